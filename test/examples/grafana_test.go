package examples

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

const dashboardFile = "../../configs/grafana-dashboard.json"

// board has the schema that Grafana 10 reads, as do later releases.
type board = dashboard.Dashboard //nolint:staticcheck // its successor is for Grafana 12

// mistakes returns what in a dashboard is not by the schema of Grafana: unknown, missing and mistyped fields, in the options
// of panels, too.
func mistakes(t *testing.T, text string) (found cog.BuildErrors) {
	t.Helper()
	plugins.RegisterDefaultPlugins()
	var d board // stays incomplete
	if err := d.UnmarshalJSONStrict([]byte(text)); !errors.As(err, &found) {
		t.Fatal(err)
	}
	return found
}

// readDashboard returns the dashboard among the examples.
func readDashboard(t *testing.T) (d board) {
	t.Helper()
	plugins.RegisterDefaultPlugins()
	if err := json.Unmarshal([]byte(readFile(t, dashboardFile)), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestGrafana(t *testing.T) {
	for _, m := range mistakes(t, readFile(t, dashboardFile)) {
		t.Error(m)
	}
	if err := readDashboard(t).Validate(); err != nil {
		t.Error(err)
	}
}

// TestGrafana_Mistakes checks that the schema finds mistakes.
func TestGrafana_Mistakes(t *testing.T) {
	text := readFile(t, dashboardFile)
	for was, tt := range map[string]struct{ is, want string }{
		`"showLegend":`:           {`"showLegends":`, "showLegends"},
		`"type": "timeseries"`:    {`"type": "stat"`, "unexpected field"},
		`"schemaVersion": 39`:     {`"schemaVersion": "39"`, "schemaVersion"},
		`"lineWidth":`:            {`"line":`, "line"},
		`"refId": "A"`:            {`"refID": "A"`, "refID"},
		`"reduceOptions":`:        {`"reduce":`, "reduceOptions"},
		`"graphTooltip": 1`:       {`"graphTooltips": 1`, "graphTooltips"},
		`"percentChangeColorMode`: {`"percentColorMode`, "percentColorMode"},
	} {
		if !strings.Contains(text, was) {
			t.Errorf("the dashboard has no %s", was)
			continue
		}
		if found := mistakes(t, strings.Replace(text, was, tt.is, 1)); !strings.Contains(found.Error(), tt.want) {
			t.Errorf("%s: %v", tt.is, found)
		}
	}
}
