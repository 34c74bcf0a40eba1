"""From a plan and a model to ranks that train, and to what their user asks of them.

In: a plan, a captured model, ``TrainSettings``. Out: a run's report, a verdict, or a job that a script steps.
Read first: ``launch.py`` (starts the ranks), ``worker.py`` (what each does with its :mod:`autopar.runtime.job`).
"""
