"""Describes this machine, measures how fast its processes communicate, and writes files in one piece."""
