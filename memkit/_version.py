"""The version of memkit: written here, read everywhere else."""

__version__ = "0.1.0.dev0"
