"""Helpers of the tests of screen that other tests use as well."""

from __future__ import annotations

# tqdm 4.70: two epochs of two steps (leave=False), then a line; from a pipe. A terminal puts a \r before each \n.
NESTED = (
    "\repochs:   0%|     | 0/2 [00:00<?, ?it/s]\n\rsteps:   0%|      | 0/2 [00:00<?, ?it/s]\x1b[A"
    "\n\rsteps:  50%|▌| 1/2 [00:00<00:00, 381300.\x1b[A\n\rsteps: 100%|█| 2/2 [00:00<00:00, 29871.4\x1b[A"
    "\n\r                                        \x1b[A\repochs:  50%|▌| 1/2 [00:00<00:00, 5262.6"
    "\n\rsteps:   0%|      | 0/2 [00:00<?, ?it/s]\x1b[A\n\rsteps:  50%|▌| 1/2 [00:00<00:00, 349525.\x1b[A"
    "\n\rsteps: 100%|█| 2/2 [00:00<00:00, 46481.8\x1b[A\n\r                                        \x1b[A"
    "\repochs: 100%|█| 2/2 [00:00<00:00, 5389.9\repochs: 100%|█| 2/2 [00:00<00:00, 4894.1\ndone\n"
)
