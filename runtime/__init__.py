"""Runtime: a plan and a model become a training job."""

if __name__ != "autopar.runtime":
    raise ImportError("import this package as autopar.runtime; runtime/ on its own is not a package")
