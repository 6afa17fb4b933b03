"""Studies at a URL: s3://, gs://, file:// or whatever else fsspec and its plugins know.

A run trains in a folder of its machine, and snapshots of that folder go to the URL as it trains. The guarantee: **a
reader of a folder at the URL gets all the files of its last completed snapshot, or, while that is being replaced or was
damaged, of the one before, and never a mixture.** It holds on any store, without renames, locks or atomic writes, since
nothing that a snapshot names is ever overwritten or deleted before two newer snapshots are whole.

Not guaranteed, and left to whoever starts the study, is that one process writes a run: nothing at the URL keeps two
studies on two machines from training the same runs. Each of their snapshots is whole; which one is the newest is open.
"""

from qklab.study.remote.study import RemoteStudy, is_url

__all__ = ["RemoteStudy", "is_url"]
