"""A run that was stopped goes on as if it had not been: state.py (pure), checkpoint.py."""
