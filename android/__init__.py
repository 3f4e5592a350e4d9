"""Phones: the bundle they run, the script that installs it in Termux, and deployment over a cable."""
