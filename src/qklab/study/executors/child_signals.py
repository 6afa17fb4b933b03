"""Preloaded by the forkserver, imported nowhere else: SIGTERM, which the forkserver holds back, reaches its children.

They are not all ours: whoever uses multiprocessing's forkserver beside a study expects `terminate` to work.
"""

import os
import signal


def unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


os.register_at_fork(after_in_child=unblock_sigterm)
