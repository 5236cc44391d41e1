"""The simulator's tests import `machine` and `pcode` from this folder."""
