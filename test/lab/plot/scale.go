package plot

import (
	"math"
	"strconv"
)

// Grouped formats n with commas between thousands.
func Grouped(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Number formats a number with three significant digits, or as an integer.
func Number(v float64) string {
	switch a := math.Abs(v); {
	case math.IsInf(v, 0):
		return "∞"
	case a >= 1000:
		return Grouped(int(math.Round(v)))
	case a >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// NiceStep returns the smallest of 1, 2 and 5 times a power of ten that is at least v.
func NiceStep(v float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(v)))
	for _, m := range []float64{1, 2, 5} {
		if v <= m*power*(1+1e-9) {
			return m * power
		}
	}
	return 10 * power
}

// A LogScale maps values from Min to Max to the W pixels from X on, logarithmically.
type LogScale struct{ Min, Max, X, W float64 }

// At returns the position of a value. Values out of range are at the ends.
func (l LogScale) At(v float64) float64 {
	v = min(max(v, l.Min), l.Max)
	return l.X + l.W*math.Log(v/l.Min)/math.Log(l.Max/l.Min)
}

// Ticks returns powers of ten, and 2 and 5 times them if there is room.
func (l LogScale) Ticks() (list []float64) {
	decades := math.Log10(l.Max / l.Min)
	factors := []float64{1, 2, 5}
	if decades > 2 {
		factors = factors[:1]
	}
	every := max(1, int(math.Ceil(decades/6)))
	first := int(math.Floor(math.Log10(l.Min)))
	for e := first; math.Pow(10, float64(e)) <= l.Max*1.001; e++ {
		if e%every != 0 {
			continue
		}
		for _, f := range factors {
			if v := f * math.Pow(10, float64(e)); v >= l.Min*0.999 && v <= l.Max*1.001 {
				list = append(list, v)
			}
		}
	}
	return list
}
