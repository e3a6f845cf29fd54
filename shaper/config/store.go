package config

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
)

// storeProtocols are those of URLs in [Shared.Store].
var storeProtocols = []string{
	"redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "unix", "shaperd",
}

const storePattern = `^(rediss?(\+sentinel|\+cluster)?://[^@?#]+|shaperd://[^@?#/]+|unix:///[^?#]+)$`

// parseStore parses the URL of a ledger, and returns it in canonical spelling. Its errors repeat
// nothing after the protocol: it may be a password.
func parseStore(url string) (string, error) {
	protocol, rest, _ := strings.Cut(url, "://")
	switch {
	case rest == "":
		return "", errors.New(`must be a URL such as "rediss://10.0.0.9:6379"`)
	case strings.ContainsAny(url, "?#") || strings.Contains(url, "@") && protocol != "unix":
		return "", errors.New("must not contain a user, password or parameters, because it is shown and logged: set username and password_file")
	case !slices.Contains(storeProtocols, protocol):
		return "", errors.New("protocol of a ledger " + unknownValue(protocol, storeProtocols, nil))
	case protocol == "unix":
		if !path.IsAbs(rest) || strings.ContainsRune(rest, 0) {
			return "", errors.New(`must have an absolute path, such as "unix:///run/redis/redis.sock"`)
		}
		return "unix://" + path.Clean(rest), nil
	}
	list, master, hasPath := strings.Cut(rest, "/")
	sentinel := strings.HasSuffix(protocol, "+sentinel")
	switch {
	case sentinel && !isName(master):
		return "", fmt.Errorf(`must end with the name of the master: "%s://10.0.0.8:26379,10.0.0.9:26379/mymaster"`, protocol)
	case !sentinel && hasPath:
		return "", errors.New("must end with the port: only database 0 is used")
	}
	nodes := strings.Split(list, ",")
	if len(nodes) > 1 && !strings.Contains(protocol, "+") {
		return "", errors.New(`must have one host; several are each a URL with "shaperd://", or in one URL with "redis+sentinel://" or "redis+cluster://"`)
	}
	for i, node := range nodes {
		d, err := parseDownstream(node)
		if err != nil || d.Port == 0 {
			return "", fmt.Errorf(`must have a host and a port, such as "10.0.0.9:6379": host %d lacks one`, i+1)
		}
		nodes[i] = d.String()
	}
	url = protocol + "://" + strings.Join(nodes, ",")
	if sentinel {
		url += "/" + master
	}
	return url, nil
}
