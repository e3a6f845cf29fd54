package config

import (
	"fmt"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

var quotaKeys = keys{
	{
		name: "quota", typ: quantityType("amount for a period", "100GB/month", `^[0-9.]+ ?[A-Za-z]+ ?/ ?(day|week|month|[0-9]+(min|h|d))( .+)?$`, ParseQuota, showQuota), defText: "none", needs: []condition{atListeners("unsupported at attachments, whose programs write no file"), notPerConnection}, overridable: true,
		field:    fieldOf(func(l *shaper.Limit) *quota.Quota { return &l.Quota }),
		omitZero: true,
		doc: "Amount that may pass in a calendar `day`, `week` or `month`, or in any `24h`, for each key value: bytes of " +
			"payload, `packets` (datagrams, if the limit matches UDP only), or `connections`, as in " +
			"`\"5000connections/day\"`. A time zone may follow, as in `\"100GB/month Europe/Berlin\"`; the default is the " +
			"time zone of the host. The used amount survives restarts and crashes in a file next to the file of `--state`, " +
			"which is required. A crash costs up to 1/256 of the quota, or one unit, and what was on its way. The first " +
			"50,000 key values of a limit are counted separately, later ones together. Cannot be combined with `shared = true`. See " +
			"[quotas](sources.md#quotas).",
	},
	{
		name: "quota_over", typ: quantityType("`refuse`, or `slow:` and a rate", "slow:1Mbit/s", `^(refuse|slow:.+)$`, parseQuotaOver, showQuotaOver), def: `"refuse"`, needs: []condition{anyOf("quota")}, overridable: true,
		field:    fieldOf(func(l *shaper.Limit) *uint64 { return &l.QuotaSlow }),
		omitZero: true,
		doc: "Behavior when `quota` is used up, until the period ends. With `\"refuse\"`, new connections are refused, " +
			"datagrams are dropped, and a connection that continues to send is closed. With `\"slow:1Mbit/s\"`, everything " +
			"continues at that rate.",
	},
}

// quotaUnits are the units of quotas in configuration, other than bytes.
var quotaUnits = map[string]quota.Unit{"packets": quota.Packets, "connections": quota.Connections}

// ParseQuota parses an amount for a period: "100GB/month", "5000connections/day Europe/Berlin" or "1000000packets/24h".
func ParseQuota(text string) (quota.Quota, error) {
	amount, per, ok := strings.Cut(text, "/")
	if !ok || strings.TrimSpace(per) == "" {
		return quota.Quota{}, fmt.Errorf("%s has no period: write %q or %q", quote(text), strings.TrimSuffix(text, "/")+"/month", strings.TrimSuffix(text, "/")+"/24h")
	}
	var q quota.Quota
	var err error
	if q.Period, err = quota.ParsePeriod(strings.Join(strings.Fields(per), " ")); err != nil {
		return quota.Quota{}, fmt.Errorf("%s: %w", quote(text), err)
	}
	amount = strings.TrimSpace(amount)
	number := strings.TrimRight(amount, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
	unit := strings.TrimSpace(amount[len(number):])
	switch of, counts := quotaUnits[unit]; {
	case number != "" && strings.Trim(number, "0.") == "":
		return quota.Quota{}, fmt.Errorf("%s would stop all traffic: write a block = true instead, or remove the key for no quota", quote(text))
	case counts:
		q.Unit = of
		if q.Amount, err = strconv.ParseUint(number, 10, 64); err != nil || q.Amount > quota.MaxAmount {
			return quota.Quota{}, fmt.Errorf("%s: %s is not a whole number up to 1e18", quote(text), quote(number))
		}
	case unit == "":
		return quota.Quota{}, fmt.Errorf("%s has no unit: write %q, %q or %q", quote(text), number+"GB/"+per, number+"packets/"+per, number+"connections/"+per)
	default:
		if q.Amount, err = ParseSize(amount); err != nil {
			return quota.Quota{}, fmt.Errorf("%w; a quota counts bytes, packets or connections", err)
		}
	}
	return q, nil
}

// FormatQuota is the inverse of ParseQuota.
func FormatQuota(q quota.Quota) string {
	return FormatQuotaAmount(q.Unit, q.Amount) + "/" + q.Period.String()
}

// FormatQuotaAmount formats an amount of what a quota counts.
func FormatQuotaAmount(u quota.Unit, n uint64) string {
	switch u {
	case quota.Packets:
		return strconv.FormatUint(n, 10) + "packets"
	case quota.Connections:
		return strconv.FormatUint(n, 10) + "connections"
	}
	return FormatSize(n)
}

func showQuota(q quota.Quota) any { return FormatQuota(q) }

func parseQuotaOver(text string) (uint64, error) {
	rate, slow := strings.CutPrefix(text, "slow:")
	switch {
	case text == "refuse":
		return 0, nil
	case !slow:
		return 0, fmt.Errorf("%s: write \"refuse\", or \"slow:\" and a rate, such as \"slow:1Mbit/s\"", quote(text))
	}
	n, err := ParseRate(strings.TrimSpace(rate))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", quote(text), err)
	}
	return n, nil
}

func showQuotaOver(bits uint64) any {
	if bits == 0 {
		return "refuse"
	}
	return "slow:" + FormatRate(bits)
}

// quotaText describes the quota of l.
func quotaText(l *shaper.Limit) string {
	text := "quota " + FormatQuota(l.Quota)
	if l.QuotaSlow > 0 {
		text += ", then " + FormatRate(l.QuotaSlow)
	}
	return text
}

// checkQuota reports what keeps l from having its quota.
func checkQuota(t table, limit *shaper.Limit) {
	if limit.Quota.Amount == 0 {
		return
	}
	at := t.overriddenKey("quota")
	switch {
	case limit.Shared:
		t.errorf(t.overriddenKey("quota", "shared"), "unsupported with shared = true: each host has its own file")
	case limit.HasConnectionQuota() && limit.SlotFor.InTurns():
		t.errorf(at, "connections: unsupported with slot_for = %q", limit.SlotFor)
	case limit.HasConnectionQuota() && limit.QueueTimeout == 0:
		t.errorf(t.overriddenKey("queue_timeout", "quota"), "0s: unsupported with a quota of connections: the first one waits until its part is written to the file")
	case limit.HasConnectionQuota() && limit.QuotaSlow > 0:
		t.errorf(t.overriddenKey("quota_over", "quota"), "%q: unsupported for connections, which have no rate of bytes here", showQuotaOver(limit.QuotaSlow))
	}
}
