"""How the processes of a run start, meet, agree and end."""
