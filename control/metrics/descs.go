package metrics

import "github.com/prometheus/client_golang/prometheus"

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("shaperd_"+name, help, labels, nil)
}

var (
	limitLabels = []string{"limit", "mode", "verdict", "reason"}

	limitBytes = desc("limit_bytes_total", "Payload bytes by the verdict of the limit, or the verdict that it would give if it observes.", limitLabels...)
	limitPkts  = desc("limit_packets_total", "Datagrams, and packets at attachments, by verdict of the limit.", limitLabels...)
	limitConns = desc("limit_connections_total", "Connections by verdict of the limit.", limitLabels...)
	inFlight   = desc("limit_connections_in_flight", "Connections that hold a slot of the limit.", "limit")
	waiting    = desc("limit_connections_waiting", "Connections that wait for a slot of the limit.", "limit")
	waitTime   = desc("limit_connection_wait_seconds", "Time that admitted connections waited for a slot of the limit.", "limit")
	maxDelay   = desc("limit_max_delay_seconds", "Maximum delay of a unit in a queue of the limit.", "limit")
	queueDelay = desc("limit_queue_delay_seconds", "Time that delayed units waited in the queues of the limit.", "limit")

	classConns = desc("class_connections_total", "New connections and UDP flows of a class: admitted, or refused.", "class", "verdict")

	listenerOpen        = desc("listener_connections_open", "Open TCP connections.", "listener")
	listenerFlows       = desc("listener_udp_flows", "Open UDP flows.", "listener")
	listenerBytes       = desc("listener_bytes_total", "Payload bytes forwarded.", "listener", "direction")
	listenerAccepted    = desc("listener_connections_accepted_total", "TCP connections accepted.", "listener")
	listenerWaiting     = desc("listener_connections_waiting", "TCP connections and UDP flows that wait for a downstream.", "listener")
	listenerHeld        = desc("listener_held", "1 while new connections wait: \"held\" by an operator, or \"down\" because no downstream can be reached.", "listener", "why")
	listenerRamp        = desc("listener_ramp_connections_per_second", "Rate at which new connections are admitted after a hold; 0 without a ramp.", "listener")
	listenerOpened      = desc("listener_udp_flows_opened_total", "UDP flows opened.", "listener")
	listenerMaxFlows    = desc("listener_udp_flows_max", "Maximum number of open UDP flows of the listener; 0 without a UDP address.", "listener")
	listenerEvicted     = desc("listener_udp_flows_evicted_total", "UDP flows evicted for another flow.", "listener")
	listenerRefused     = desc("listener_udp_flows_refused_total", "Datagrams dropped because their flow could not be opened.", "listener")
	downstreamUp        = desc("downstream_up", "1 if the downstream is reachable and not drained; 0 if checks or dials fail, it has no address, or an operator drained it.", "listener", "downstream")
	downstreamDrained   = desc("downstream_drained", "1 if an operator drained the downstream.", "listener", "downstream")
	downstreamConns     = desc("downstream_connections", "TCP connections and UDP flows of this listener to the downstream.", "listener", "downstream")
	downstreamConnect   = desc("downstream_connect_seconds", "Duration of the TCP handshakes with the downstream.", "listener", "downstream")
	downstreamFirstByte = desc("downstream_first_byte_seconds", "Time to the first byte of the downstream on a connection, from the last byte sent to it before, or from the handshake. It excludes waits inside shaperd.", "listener", "downstream")
	downstreamAnswer    = desc("downstream_answer_seconds", "Time from the last byte of a request, as sent to the downstream, to the first byte of its answer. It excludes waits inside shaperd.", "listener", "downstream")
	downstreamRTT       = desc("downstream_rtt_seconds", "Smoothed round-trip time of each TCP connection in use to the downstream, once a second.", "listener", "downstream")
	downstreamBytes     = desc("downstream_bytes_total", "Payload bytes forwarded.", "listener", "downstream", "direction")
	downstreamDials     = desc("downstream_dials_failed_total", "Failed TCP connects to the downstream, by reason: refused, timeout, or other. Failures of this host do not count.", "listener", "downstream", "reason")
	downstreamResets    = desc("downstream_resets_total", "TCP connections that the downstream reset, or that timed out.", "listener", "downstream")
	downstreamBreaker   = desc("downstream_breaker_opened_total", "Number of times that the breaker of the downstream has opened.", "listener", "downstream")
	downstreamICMP      = desc("downstream_icmp_errors_total", "ICMP errors in response to datagrams to the downstream.", "listener", "downstream")
	downstreamRetrans   = desc("downstream_retransmits_total", "TCP segments retransmitted to the downstream.", "listener", "downstream")
	downstreamBusy      = desc("downstream_busy_seconds_total", "Time in which data was on its way to the downstream, over all TCP connections.", "listener", "downstream")
	downstreamLimited   = desc("downstream_receiver_limited_seconds_total", "Time in which data was on its way to the downstream and its receive window was full, over all TCP connections.", "listener", "downstream")

	listenerSuppressed = desc("listener_udp_replies_suppressed_total", "UDP replies dropped because they would have amplified traffic to an unverified source.", "listener")
	listenerDial       = desc("listener_dial_errors_total", "TCP connections and UDP flows for which no downstream could be reached.", "listener")
	listenerEnded      = desc("listener_connections_ended_total", "TCP connections ended, by reason.", "listener", "reason")
	listenerSend       = desc("listener_send_errors_total", "Datagrams dropped because a socket refused them, an ICMP error came back, or the buffer of their waiting flow was full.", "listener")

	bucketEntries   = desc("buckets", "Buckets in the table of the proxy plane, except those in use by an open flow.")
	bucketCapacity  = desc("buckets_capacity", "Capacity of the bucket table of the proxy plane.")
	bucketEvictions = desc("buckets_evicted_total", "Buckets evicted for another one: drained, or with a backlog, which the new bucket inherits.", "state")

	penalized        = desc("penalized_sources", "Sources that the penalty of the limit blocks, or with mode \"observe\" would.", "limit", "mode")
	penaltiesImposed = desc("penalties_total", "Number of times that the penalty of the limit has blocked a source, or with mode \"observe\" would have.", "limit", "mode")
	penaltiesEvicted = desc("penalties_evicted_total", "Blocks by the penalty of the limit that ended early because too many sources were blocked.", "limit", "mode")

	limitHistories        = desc("limit_histories", "Keys of a limit with algorithm sliding-window or sliding-log that have a history of connections, except those in use.", "limit")
	limitHistoryBytes     = desc("limit_histories_bytes", "Memory of the histories of the limit; at most 16 MiB.", "limit")
	limitHistoryEvictions = desc("limit_histories_evicted_total", "Histories evicted for a new key before they were empty; the key inherits them.", "limit")

	limitObserves    = desc("limit_observes", "1 if the limit only observes.", "limit")
	limitHeaviest    = desc("limit_heaviest_share", "Part of the bytes of a limit that its heaviest key has at least, with a half-life of 5 s; 0 without traffic.", "limit")
	limitBusyKeys    = desc("limit_busy_keys", "Keys of a limit with at least a byte a second, with a half-life of 5 s; at most 256.", "limit")
	limitKeysRefused = desc("limit_keys_refused", "Number of keys with refusals in the last one to two minutes, accurate to some percent.", "limit")
	decisionTime     = desc("decision_seconds", "Duration of decisions on new connections and UDP flows, of one in 16 of them.")

	limitTickets = desc("limit_tickets_total", "Tickets for new connections that the ledger has sold this host: used, or void because no connection passed in time.", "limit", "result")
	limitMarked  = desc("limit_marked_packets_total", "Packets marked CE because of a long queueing delay.", "limit")

	attachmentUp      = desc("attachment_up", "1 if limits apply to packets at the interface. The interface label is empty if a named interface is missing; there is no series while no interface matches the patterns.", "attachment", "interface", "direction", "mode")
	attachmentQueue   = desc("attachment_queue_packets", "Packets in the queue of the interface.", "attachment", "interface", "direction")
	attachmentBacklog = desc("attachment_queue_bytes", "Bytes in the queue of the interface, headers included.", "attachment", "interface", "direction")
	attachmentDrops   = desc("attachment_queue_drops_total", "Packets dropped by the queue of the interface after they were charged: the interface is slower than its traffic.", "attachment", "interface", "direction")

	packetBuckets   = desc("packet_buckets", "Buckets of the packet plane that have a backlog.")
	packetCapacity  = desc("packet_buckets_capacity", "Capacity of the bucket table of the packet plane.")
	packetEvictions = desc("packet_buckets_evicted_total", "Buckets of the packet plane evicted for another one: drained, or with a backlog, which the new bucket inherits.", "state")
	packetLost      = desc("packet_buckets_lost_total", "Packets refused because other CPUs took every table slot that was tried.")
	packetReadable  = desc("packet_plane_readable", "1 if the state of the packet plane could be read.")

	limitRate       = desc("limit_rate_bytes", "Rate of each bucket of the limit in bytes per second, if it has one.", "limit")
	limitMaxConns   = desc("limit_connections_max", "Maximum number of connections in flight of each key of the limit, if it has one.", "limit")
	limitShed       = desc("limit_shed_ratio", "Part of the new connections and UDP flows that a limit with shed refuses at present, or with mode \"observe\" would.", "limit", "mode")
	limitSignal     = desc("limit_shed_signal_readable", "1 if a limit with shed can read this signal. A signal that cannot be read sheds nothing.", "limit", "signal")
	limitAdapted    = desc("limit_connections_adapted", "Maximum number of connections in flight that an adaptive limit has chosen, or with adapt = \"observe\" would choose; absent while it is unknown.", "limit")
	limitSigma      = desc("limit_sigma_bytes", "Largest excess over rate x time, in any interval, of the traffic of a bucket of the limit over the last minute.", "limit")
	limitAllowed    = desc("limit_sigma_allowed_bytes", "Allowed excess: burst, one unit, and the catch-up after a late wake-up.", "limit")
	limitViolations = desc("limit_conformance_violations_total", "Units that left a bucket of the limit beyond the allowed excess.", "limit")

	quotaUsed   = desc("quota_used_ratio", "Used part of the quota of the key that has used most of it in the present period.", "limit")
	quotaKeys   = desc("quota_keys", "Keys that have used something of their quota in the present period.", "limit")
	quotaUsedUp = desc("quota_used_up_keys", "Keys whose quota is used up.", "limit")
	quotaFileUp = desc("quota_file_up", "1, or 0 while the file of quotas cannot be written: traffic beyond the last claim waits.")

	bypassOn        = desc("bypass", "1 while bypass is on: every limit observes.")
	overriddenKeys  = desc("overrides", "Number of limit keys that operators override at runtime.")
	blockedPrefixes = desc("blocked_prefixes", "Number of blocked source prefixes.")
	sourceErrors    = desc("source_file_errors", "Errors in the present files of groups, or of values of limits: the previous contents are effective.")
	stateSaveFailed = desc("state_save_failed", "1 if runtime changes of operators could not be saved: a restart loses them, or restores outdated ones.")
	logDropped      = desc("log_records_dropped_total", "Log records dropped because the writer was blocked.")
	buildInfo       = desc("build_info", "Constant 1, labeled with the versions of the daemon and of Go.", "version", "goversion")

	pacerLate = desc("pacer_wakeup_latency_seconds", "Wake-up latency of the pacing thread.")

	configInfo    = desc("config_info", "1, with a hash of the configuration in its canonical form, without overrides of operators.", "revision")
	reloadOK      = desc("config_reload_success", "1 if the last reload succeeded, 0 if it failed and the previous configuration is effective.")
	reloadTime    = desc("config_reload_timestamp_seconds", "Time at which the current configuration was loaded.")
	reloadSeconds = desc("config_reload_duration_seconds", "Duration of the last reload.")
	reloadTotal   = desc("config_reloads_total", "Reloads by result, including the first load.", "result")

	sharedHosts       = desc("shared_hosts", "Number of hosts that may share limits.")
	sharedLive        = desc("shared_live_hosts", "Hosts of the group that are counted, and with failover = \"fast\" those that are gone, as far as this host knows. A part of each shared limit is kept for each other host.")
	sharedDisagreeing = desc("shared_disagreeing_hosts", "Hosts of the group with other shared limits than this host.")
	sharedJoined      = desc("shared_joined", "1 if this host is in its group and its lease has not ended, 0 if it is alone.")
	sharedCounted     = desc("shared_counted", "1 if the other hosts of the group count on this one.")
	sharedWithdrawn   = desc("shared_withdrawn", "1 while this host is alone and lets the whole of each shared limit pass, so that all hosts together may exceed it.")
	sharedLeaseAge    = desc("shared_lease_age_seconds", "Time since the call to the ledger that renewed the lease was sent.")
	sharedHot         = desc("shared_hot_buckets", "Shared buckets of which a host needs more than an equal part.")
	sharedEpochs      = desc("shared_epochs_total", "Number of times that the ledger started over and hosts had to claim their parts again: its state was lost, its clock was set, or no host reached it for a while.")
	sharedAlone       = desc("shared_alone_seconds_total", "Time for which this host was not in its group, or its lease had ended.")
	sharedCalls       = desc("shared_calls_total", "Calls to the ledger, by result.", "result")
	sharedCallTime    = desc("shared_call_seconds", "Duration of answered calls to the ledger.")
	sharedShare       = desc("shared_share_ratio", "Part of the rates of the limit that this host may use, from 0 to 1; with a key, of each cold bucket.", "limit")
	sharedConnections = desc("shared_connections_max", "Connections that may be in flight at this host under the limit; with a key, of each cold bucket.", "limit")
	sharedWant        = desc("shared_want_ratio", "Part of the limit that this host needs, from 0 to 1; with a key, of the bucket of which it needs most. 0 if it needs no more than an equal part.", "limit")
	sharedShort       = desc("shared_short", "Buckets of the limit of which this host should get more, as soon as other hosts have returned it; with a key, among the ten of which it has most.", "limit")
)
