"""The command line: starting ranks by an MPI launcher."""
