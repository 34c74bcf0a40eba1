"""HTML: one file that shows a document in a browser, and asks no network.

In: parts, charts, stages that fold, commands. Out: the text of a page. Read ``page.py`` first, then ``charts.py``, what
is drawn of documents, and ``steps.py``, of timelines. A chart is a specification for Vega-Lite, whose scripts the page
holds; jinja2 fills ``page.html``, and escapes what is in it.
"""
