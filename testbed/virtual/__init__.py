"""The scheduler in virtual time: runs, prediction, planning, recovery."""
