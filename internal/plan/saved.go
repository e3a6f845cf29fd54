package plan

import (
	"fmt"
	"path/filepath"
	"strings"

	"shaperd.dev/shaperd/shaper/config"
)

const savedPrefix = "90-set-"

// SavedPath returns the path of the file to which "set limit --save" writes the overrides of a
// limit of the configuration at path.
func SavedPath(path, limit string) string {
	return filepath.Join(filepath.Dir(path), "conf.d", savedPrefix+limit+".toml")
}

func savedHeader(limit string) string {
	return fmt.Sprintf("# Written by \"shaperd set limit --save\": do not edit it. \"shaperd unset limit %s --saved\" removes it.\n", limit)
}

// FormatSaved returns the text of the file with the overrides of a limit.
func FormatSaved(limit string, set map[string]string) (string, error) {
	text, err := config.FormatOverride(limit, set)
	return savedHeader(limit) + text, err
}

// ParseSaved returns the overrides in a text of that file, and whether it holds nothing else.
func ParseSaved(limit, text string) (set map[string]string, ok bool) {
	override, ok := strings.CutPrefix(text, savedHeader(limit))
	set, err := config.ParseOverride(limit, override)
	return set, ok && err == nil
}

// migrateSaved returns files with the current keys in those that an earlier version saved, and
// the paths of these. The daemon may not write them, and users are told not to edit them.
func migrateSaved(files *config.Files) (migrated *config.Files, old []string) {
	migrated = files
	for path, text := range files.All() {
		limit, ok := strings.CutPrefix(strings.TrimSuffix(filepath.Base(path), ".toml"), savedPrefix)
		if !ok || filepath.Base(filepath.Dir(path)) != "conf.d" {
			continue
		}
		set, ok := ParseSaved(limit, text)
		if !ok {
			continue
		}
		if now, err := FormatSaved(limit, set); err == nil && now != text {
			migrated = migrated.With(path, now)
			old = append(old, path)
		}
	}
	return migrated, old
}
