"""Other libraries' calls over this one's ops: each converts at its boundary and nowhere else."""
