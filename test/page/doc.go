// Package page tests the web page in a browser: headless Chromium, driven by
// playwright-core from page.mjs. The page's own files are served with fake answers of the
// control API, a scenario each, so that a broken promise is to be had for the asking; and once
// it is the built daemon's: the file that SHAPERD_BIN names, or bin/shaperd.
//
// fetch.sh puts playwright-core into build/page, as package-lock.json says. To look at the
// scenarios in a browser of one's own:
//
//	go test ./test/page -run Serve -serve -timeout 0
//
// and to have pictures of them:
//
//	go test ./test/page -pictures DIRECTORY
package page
