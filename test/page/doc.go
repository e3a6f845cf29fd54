// Package page tests the dashboard in a browser: headless Chromium, driven by
// playwright-core from page.mjs. The files of the dashboard are served with fake responses of
// the control API, one scenario each, so that even a violated limit can be shown; and once by
// the built daemon: the file named by SHAPERD_BIN, or bin/shaperd.
//
// fetch.sh installs playwright-core into build/page, pinned by package-lock.json. To view the
// scenarios in a browser:
//
//	go test ./test/page -run Serve -serve -timeout 0
//
// and to take screenshots of them:
//
//	go test ./test/page -pictures DIRECTORY
package page
