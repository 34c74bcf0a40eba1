"""The files and columns that autopar's parts hand each other: data and validation, nothing else."""
