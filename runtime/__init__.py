"""Runtime: a plan and a model become a training job.

A step goes this way: ``start`` (once), ``data`` or ``loaders``, ``execute``, which runs ``stage`` and ``messages``,
then ``gradients`` and ``loss``, ``update``, and at the end ``outcome`` (report and timeline) and ``checkpoint`` (what
is kept). ``job`` builds one rank's part of all this. ``rehearsal`` performs it without devices,
``faults`` are drills, ``device`` is what GPUs and hosts have of their own. Read ``interpret.py``, then ``execute.py``;
``examples/own_stages.py`` steps jobs in threads, without a profile.
"""

if __name__ != "autopar.runtime":
    raise ImportError("import this package as autopar.runtime; runtime/ on its own is not a package")
