package sharing

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/conn/adaptive"
	"shaperd.dev/shaperd/shaper/config"
)

// Info is what hosts tell each other, besides what the ledger needs.
type Info struct {
	Version string            `json:"version"`
	Limits  map[string]string `json:"limits,omitempty"` // what all must agree on, see [config.Config.SharedLimits]
	Hashes  map[string]string `json:"hashes,omitempty"` // of Limits, if these are too long

	Adaptive map[string]adaptive.Report `json:"adaptive,omitempty"` // of limits with adapt, by [ReportName]
}

// ReportName returns what stands for the name of a limit in Info.Adaptive: names may be long.
func ReportName(limit string) string { return hashText(limit) }

// NewInfo returns what the others are told about this host with a configuration.
func NewInfo(version string, c *config.Config) *Info {
	return &Info{Version: version, Limits: c.SharedLimits()}
}

// Text formats i and reports in at most [cluster.MaxInfo] bytes: in as few as it takes, and the reports above all.
func (i *Info) Text(reports map[string]adaptive.Report) string {
	hashes := map[string]string{}
	for name, text := range i.Limits {
		hashes[name] = hashText(text)
	}
	for _, info := range []Info{{Version: i.Version, Limits: i.Limits}, {Version: i.Version, Hashes: hashes}, {Version: i.Version}, {}} {
		info.Adaptive = reports
		text, _ := json.Marshal(info) // strings and integers always encode
		if len(text) <= cluster.MaxInfo {
			return string(text)
		}
	}
	return ""
}

// ParseInfo returns what a host told about itself; another version may tell something else.
func ParseInfo(text string) (info Info) {
	_ = json.Unmarshal([]byte(text), &info)
	return info
}

func hashText(text string) string {
	h := fnv.New32a()
	h.Write([]byte(text))
	return fmt.Sprintf("%x", h.Sum32())
}

// Differences returns how the limits of a host, which are not the same as those here, differ from them.
func Differences(host string, here map[string]string, there Info) (all []api.SharedDifference) {
	names := slices.AppendSeq(slices.Collect(maps.Keys(here)), maps.Keys(there.Limits))
	names = slices.AppendSeq(names, maps.Keys(there.Hashes))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		d := api.SharedDifference{Host: host, Limit: name}
		text, isHere := here[name]
		other, isThere := there.Limits[name]
		hash, hashed := there.Hashes[name]
		switch {
		case hashed && isHere:
			if hash == hashText(text) {
				continue
			}
		case hashed:
			d.There = "shared"
		case len(there.Limits)+len(there.Hashes) == 0 || isThere && text == other:
			continue
		case isHere && isThere:
			d.Here, d.There = valuesWithout(text, other), valuesWithout(other, text)
		default:
			d.Here, d.There = text, other
		}
		all = append(all, d)
	}
	if all == nil {
		all = append(all, api.SharedDifference{Host: host})
	}
	return all
}

// valuesWithout returns the values of a line that another one does not have, or all if there are none.
func valuesWithout(line, other string) string {
	has := strings.Split(other, "; ")
	left := slices.DeleteFunc(strings.Split(line, "; "), func(v string) bool { return slices.Contains(has, v) })
	if len(left) == 0 {
		return line
	}
	return strings.Join(left, "; ")
}

// DifferenceText says what d is: "about limit "total": here rate 80Mbit/s; at gw2 rate 90Mbit/s."
func DifferenceText(d api.SharedDifference) string {
	name := fmt.Sprintf("limit %q", d.Limit)
	if d.Limit == "[shared]" {
		name = d.Limit
	}
	switch {
	case d.Limit == "":
		return fmt.Sprintf("about shared limits: those at %s are not the same as here.", d.Host)
	case d.Here == "" && d.There == "":
		return fmt.Sprintf("about %s: it is not the same at %s as here.", name, d.Host)
	case d.Here == "":
		return fmt.Sprintf("about %s: it is shared at %s, and not here.", name, d.Host)
	case d.There == "":
		return fmt.Sprintf("about %s: it is shared here, and not at %s.", name, d.Host)
	}
	return fmt.Sprintf("about %s: here %s; at %s %s.", name, d.Here, d.Host, d.There)
}
