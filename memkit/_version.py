"""The version of memkit: written here, read everywhere else."""

__version__ = "0.2.0.dev0"
