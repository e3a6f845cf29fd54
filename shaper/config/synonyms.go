package config

import (
	"slices"
	"strings"
)

// synonyms has the names that other products give to keys, by TOML
// table. A name may have several meanings.
var synonyms = map[string]map[string][]string{
	"": invert(map[string]string{
		"daemon":      "global general settings",
		"transparent": "tproxy",
		"shared":      "cluster distributed peers redis",
		"asn":         "as autonomous_system autonomous_systems",
		"listen":      "listener listeners frontend frontends server servers proxy stream entrypoint",
		"attach":      "attachment attachments interface interfaces",
		"group":       "groups acl acls address_list address_set ipset",
		"class":       "classes traffic_class priority qos tier",
		"limit":       "limits limiter rule rules policy policies ratelimit rate_limit",
		"override":    "overrides set",
	}),
	"[daemon]": invert(map[string]string{
		"observe":     "dry_run dryrun monitor shadow",
		"metrics":     "prometheus stats exporter",
		"dashboard":   "ui web webui gui admin",
		"max_buckets": "table_size max_keys max_entries",
		"loops":       "threads workers nbthread worker_processes cores cpus concurrency",
		"pin_path":    "pin_dir bpf_pin_dir bpffs",
	}),
	"[transparent]": invert(map[string]string{
		"rules": "nftables iptables",
		"mark":  "fwmark table",
	}),
	"[shared]": invert(map[string]string{
		"hosts":         "host nodes members peers replicas size count",
		"name":          "hostname node node_name id",
		"store":         "redis valkey ledger url urls address addresses server servers endpoint endpoints backend",
		"username":      "user acl_user",
		"password_file": "password pass passwd auth requirepass secret",
		"ca_file":       "ca cacert ca_cert tls_ca",
		"cert_file":     "cert certificate tls_cert",
		"key_file":      "key private_key tls_key",
		"prefix":        "key_prefix namespace",
		"lease":         "ttl lease_time",
		"interval":      "period refresh sync_interval every",
		"alone":         "fallback on_failure failure_mode",
		"failover":      "consistency",
		"serve":         "listen bind listen_address",
	}),
	"[asn]": invert(map[string]string{
		"files": "file path paths database db mmdb csv",
	}),
	"[[listen]]": invert(map[string]string{
		"address":                    "addresses addr bind listen listen_on port ports endpoint",
		"downstream":                 "upstream upstreams backend backends server servers target targets host hosts pool cluster to forward forward_to proxy_pass default_backend",
		"balance":                    "algorithm lb lb_policy load_balance load_balancing balancer policy scheduler",
		"slow_start":                 "slowstart ramp_up",
		"check":                      "checks health_check health_checks healthcheck health",
		"eject":                      "outlier_detection passive_check max_fails fail_timeout",
		"breaker":                    "circuit_breaker circuitbreaker fuse",
		"accept_proxy_from":          "accept_proxy proxy_protocol set_real_ip_from trusted_proxies",
		"send_proxy":                 "proxy_protocol send_proxy_v2",
		"transparent":                "tproxy proxy_bind",
		"access_log":                 "log logging accesslog",
		"connect_timeout":            "timeout timeout_connect connection_timeout dial_timeout proxy_connect_timeout",
		"tcp_idle_timeout":           "timeout client_timeout server_timeout timeout_client timeout_server timeout_tunnel proxy_timeout keepalive_timeout",
		"udp_idle_timeout":           "timeout",
		"half_close_timeout":         "timeout_client_fin timeout_server_fin",
		"max_lifetime":               "max_connection_duration max_duration",
		"min_throughput":             "min_rate min_speed",
		"max_flows":                  "max_sessions max_clients",
		"downstream.max_connections": "maxconn max_conn max_conns maxconns",
		"max_flows_per_source":       "max_flows_per_ip max_flows_per_client",
	}),
	"downstream": invert(map[string]string{
		"address":         "addr host hostname server url uri target ip endpoint name",
		"max_connections": "maxconn max_conn max_conns maxconns",
		"weight":          "priority",
	}),
	"check": invert(map[string]string{
		"interval": "inter period every",
		"rise":     "passes healthy_threshold success_threshold",
		"fall":     "fails unhealthy_threshold failure_threshold",
	}),
	"eject": invert(map[string]string{
		"after": "max_fails consecutive_errors failures error_limit",
		"for":   "fail_timeout ejection_time base_ejection_time duration",
	}),
	"[[group]]": invert(map[string]string{
		"source": "sources prefix prefixes address addresses cidr cidrs network networks ip",
		"asn":    "as asns",
		"file":   "files path list include",
	}),
	"[[class]]": invert(map[string]string{
		"match":    "filter selector acl",
		"weight":   "share quantum",
		"priority": "prio order",
	}),
	"[[attach]]": invert(map[string]string{
		"interface":        "interfaces iface ifname dev device nic link",
		"observe":          "dry_run dryrun monitor shadow",
		"hook":             "program",
		"queue":            "txqueuelen queue_limit queue_size",
		"tcp_idle_timeout": "timeout conntrack_timeout",
	}),
	"[[limit]]": synonymsInLimit,
	"[[override]]": invert(map[string]string{
		"limit": "name",
	}, synonymsInLimit),
	"match": invert(map[string]string{
		"listen":      "listener listeners frontend server",
		"attach":      "attachment attachments interface interfaces iface dev",
		"protocol":    "proto l4proto",
		"source":      "sources src saddr from ip client client_ip source_ip src_ip address",
		"destination": "destinations dst daddr dest to destination_ip dst_ip",
		"asn":         "as asns autonomous_system",
		"group":       "groups acl",
		"country":     "countries country_code geoip geo iso_code",
		"port":        "ports dport dst_port destination_port",
		"dscp":        "dscps tos ds diffserv traffic_class",
		"cgroup":      "cgroups control_group slice unit service",
		"mark":        "marks fwmark skb_mark meta_mark firewall_mark",
	}),
}

var synonymsInLimit = invert(map[string]string{
	"match":           "filter selector acl",
	"match.listen":    "listen listener",
	"match.attach":    "attach attachment interface",
	"match.source":    "source src",
	"match.asn":       "asn",
	"match.port":      "port dport",
	"match.protocol":  "protocol proto",
	"match.group":     "group groups",
	"except":          "exclude exclusions exempt exemptions whitelist allowlist allow unless not",
	"for":             "tiers tier",
	"values":          "map table csv",
	"algorithm":       "strategy window",
	"reserve":         "guarantee guaranteed reserved minimum floor",
	"turns":           "fairness fair_by",
	"key":             "keys group_by per by",
	"shared":          "cluster distributed global scope",
	"ipv4_prefix":     "ipv4_mask ipv4_prefix_length",
	"ipv6_prefix":     "ipv6_mask ipv6_prefix_length",
	"rate":            "bandwidth bps speed max_rate limit_rate throughput",
	"packets":         "pps packet_rate max_packets",
	"burst":           "burst_size bucket_size",
	"max_delay":       "delay latency max_latency",
	"scheduling":      "scheduler qdisc fairness queueing",
	"ecn_mark":        "ecn ecn_threshold",
	"max_connections": "maxconn max_conn max_conns maxconns conn_limit connlimit limit_conn concurrency",
	"new_connections": "conn_rate connection_rate connections_per_second cps sess_rate max_conn_rate",
	"queue_timeout":   "timeout timeout_queue wait wait_timeout",
	"max_queue":       "maxqueue queue queue_size backlog",
	"refuse_with":     "on_exceed action exceed_action reject_with",
	"reply":           "response body message",
	"block":           "deny blacklist denylist",
	"observe":         "dry_run dryrun monitor shadow",
})

// valueSynonyms has the words of other products for the values of keys, by key. Values that
// a key does not have in a table are ignored there.
var valueSynonyms = map[string]map[string][]string{
	"balance": invert(map[string]string{
		"round-robin":       "rr roundrobin static-rr weighted",
		"least-connections": "lc wlc leastconn least_conn least-request least_request",
		"source-hash":       "sh source hash ip_hash ip-hash iphash ring_hash maglev consistent",
	}),
	"direction": invert(map[string]string{
		"to-downstream":   "in inbound upload up request to-server to-backend to-upstream from-client client-to-server",
		"from-downstream": "out outbound download down response from-server from-backend from-upstream to-client server-to-client",
		"both":            "any all bidirectional duplex inout",
		"ingress":         "in inbound input rx receive incoming",
		"egress":          "out outbound output tx send outgoing",
	}),
	"key": invert(map[string]string{
		"source":     "ip src client client_ip remote_addr address source_ip src_ip",
		"asn":        "as",
		"port":       "dport dst_port",
		"listen":     "listener frontend",
		"connection": "conn flow session",
		"attach":     "attachment interface iface",
	}),
	"turns": invert(map[string]string{
		"source":   "ip src client address",
		"prefix24": "24 /24 prefix subnet network prefix48",
		"asn":      "as",
	}),
	"mode": invert(map[string]string{
		"shape":  "delay queue hold shaping",
		"police": "drop policing policer limit",
	}),
	"hook": invert(map[string]string{
		"auto":   "any",
		"clsact": "cls_bpf ingress egress",
		"xdp":    "driver xdpdrv native",
	}),
	"on_stop": invert(map[string]string{
		"open": "fail-open remove detach",
		"keep": "stay persist",
	}),
	"rules":      invert(map[string]string{"install": "auto automatic", "manual": "none off external"}),
	"send_proxy": invert(map[string]string{"off": "none no false", "v1": "1", "v2": "2"}),
	"scheduling": invert(map[string]string{
		"fair": "fq sfq fq_codel drr wfq fair-queue fair-queueing",
		"fifo": "fcfs first-come none",
	}),
	"refuse_with": invert(map[string]string{
		"reset":  "rst tcp-reset tcp_reset",
		"close":  "fin",
		"drop":   "silent-drop silent ignore",
		"reply":  "429 http-429 http_429 message",
		"reject": "icmp port-unreachable",
	}),
	"alone": invert(map[string]string{
		"share":  "local static split",
		"closed": "fail-closed fail_closed deny none nothing",
		"open":   "fail-open fail_open allow all",
	}),
	"failover": invert(map[string]string{"strict": "safe slow"}),
	"protocol": invert(map[string]string{"icmp": "icmpv6 icmp6 ping"}),
}

// replySynonyms has the words that may mean the name of a reply, which may also be a text.
var replySynonyms = invert(map[string]string{
	"http-429": "429 http http429",
	"http-503": "503 http503",
	"postgres": "pg pgsql postgresql",
	"mysql":    "mariadb percona",
	"redis":    "valkey keydb resp",
	"smtp":     "mail esmtp submission",
	"smpp":     "sms",
	"modbus":   "modbus-tcp mbap",
})

// invert returns the names by word, of lists of words by name.
func invert(words map[string]string, more ...map[string][]string) map[string][]string {
	inverse := map[string][]string{}
	for name, list := range words {
		for word := range strings.FieldsSeq(list) {
			inverse[word] = append(inverse[word], name)
		}
	}
	for _, m := range more {
		for word, names := range m {
			inverse[word] = append(inverse[word], names...)
		}
	}
	for _, names := range inverse {
		slices.Sort(names)
	}
	return inverse
}
