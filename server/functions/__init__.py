"""The functions of a model (`model.py`), which run before and after it, on a thread of the tenant's HTTP process."""
