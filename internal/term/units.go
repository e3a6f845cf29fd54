package term

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper/config"
)

// round3 rounds v to three significant digits.
func round3(v float64) float64 {
	if v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return 0
	}
	unit := math.Pow10(int(math.Floor(math.Log10(v))) - 2)
	if unit < 1 {
		return math.Round(v/unit) / math.Round(1/unit)
	}
	return math.Round(v/unit) * unit
}

// maxFigure bounds the figures that are formatted.
const maxFigure = 1e18

// Rate formats bytes per second as bits, as configurations do.
func Rate(v float64) string {
	bits := uint64(round3(math.Round(min(v, maxFigure) * 8)))
	if bits == 0 {
		return "0"
	}
	return config.FormatRate(bits)
}

// Size formats a number of bytes, in powers of ten.
func Size[N uint64 | float64](n N) string {
	if n < 1 {
		return "0"
	}
	return strings.TrimSuffix(config.FormatRateBytes(8*uint64(round3(min(float64(n), maxFigure)))), "/s")
}

// Seconds formats a number of seconds as a duration.
func Seconds(v float64) string {
	if v <= 0 {
		return "0"
	}
	d := time.Duration(min(v, maxFigure/1e9) * 1e9)
	switch {
	case d >= time.Hour:
		d = d.Round(time.Minute)
	case d >= time.Minute:
		d = d.Round(time.Second)
	case d < time.Microsecond:
		d = time.Microsecond
	default:
		d = time.Duration(round3(float64(d)))
	}
	return config.FormatDuration(d)
}

// PerSecond formats a number of events per second.
func PerSecond(v float64) string {
	if v < 0.005 {
		return "0"
	}
	return Number(v) + "/s"
}

// Number formats v with three significant digits.
func Number(v float64) string { return strconv.FormatFloat(round3(v), 'f', -1, 64) }

// Plural formats a number of things: "1 flow", "2 flows".
func Plural(n int64, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// Percent formats a share: 0.5 is "50%".
func Percent(v float64) string {
	if v > 0 && v < 0.01 {
		return "<1%"
	}
	return strconv.FormatFloat(math.Round(v*100), 'f', 0, 64) + "%"
}

// Clock formats a point in time, with the date unless it is that of now.
func Clock(t, now time.Time) string {
	t, now = t.Local(), now.Local()
	if t.Year() == now.Year() && t.YearDay() == now.YearDay() {
		return t.Format("15:04:05")
	}
	return t.Format("2006-01-02 15:04:05")
}

// Until formats an end, or returns otherwise when t is nil.
func Until(t *time.Time, now time.Time, otherwise string) string {
	if t == nil {
		return otherwise
	}
	return "until " + Clock(*t, now)
}
