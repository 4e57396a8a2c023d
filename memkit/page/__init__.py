"""A report as an interactive page, and as a file for PyTorch's memory viewer.

Pages are made from frozen values: nothing is measured or decided here.

- `document`: the page as one HTML file, with its `assets`
- `under_plan`: bytes over time under a plan
- `snapshot`: the file for PyTorch's memory viewer
"""

from memkit.page.document import write_page
from memkit.page.snapshot import snapshot_of, write_snapshot

__all__ = ["snapshot_of", "write_page", "write_snapshot"]
