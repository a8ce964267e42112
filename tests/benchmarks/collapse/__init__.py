"""Do the alerts find true collapse, early, with its cause, and stay silent otherwise?

    python -m tests.benchmarks.collapse                 # train every kind and judge (long)
    python -m tests.benchmarks.collapse --only qk_      # kinds whose name begins so
    python -m tests.benchmarks.collapse --judge FOLDER  # judge traces that were trained before

Every run is trained with Lightning and the callback. What happened to it is judged without
attention: by its validation loss against a *twin*, the same seed and data without the fault.
"""
