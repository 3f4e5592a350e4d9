"""Phones: the bundle that they run, the script that installs it in Termux, and deployment over adb."""
