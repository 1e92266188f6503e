"""Serves the web pages of the server below `/ui`.

    browser ─ GET /ui/nodes ─▶ AuthMiddleware: cookie ─▶ caller ─▶ route in `pages/` ─▶ `Site.ask` ─▶ API handler
            ◀─ HTML ─────────────────────────────────── template in `templates/` ◀─ wire structs ◀─┘
            ─ same address, Accept: text/event-stream ─▶ `live_page.py` renders again, and sends changed parts
            ─ POST /ui/runs/…/cancel, form with CSRF token ─▶ `Site.ask` ─▶ API handler ─▶ 303 to a page

A page has no access to the database. `Site.ask` calls the handlers of the JSON API with the checks of the API. A page
therefore shows and changes exactly what its reader could see and change through the API. Read `site.py` first.

To add a page, write a route in a module of `pages/`, a template of the same name, and an entry in `navigation.py`.

Failure cases:
* Without a session, every page redirects to the sign-in page, and every stream answers 401.
* Objects of other users and pages without rights answer 404, so that they do not reveal what exists.
* If the server stops, streams end. The browser reconnects, and the page shows since when it is not live.
* Without scripts, every page works: forms post, links open, and a reload shows the current state.
"""
