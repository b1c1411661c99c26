"""A run that was stopped goes on as if it had not been: state.py (pure), generators.py, rank_file.py, choice.py, checkpoint.py."""
