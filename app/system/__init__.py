"""This machine: what it is, how fast its processes communicate, files that are whole or not there."""
