"""Other people's code, copied unchanged so that payloads do not depend on what the user has installed.

`cloudpickle.py` is the file of that name of cloudpickle 3.1.2 (BSD 3-clause, `LICENSE.cloudpickle`). It is not imported from
here: `payload` loads it under the module name `_sgpu_cloudpickle`, the name that pickles refer to.
"""
