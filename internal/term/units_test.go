package term

import "testing"

func TestFormatFigures(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{Rate(0), "0"},
		{Rate(0.01), "0"},
		{Rate(1.25e6), "10Mbit/s"},
		{Rate(1234567), "9.88Mbit/s"},
		{Rate(1e30), "8000000Tbit/s"},
		{Size(uint64(0)), "0"},
		{Size(999.6), "1kB"},
		{Size(uint64(123456)), "123kB"},
		{Size(uint64(1) << 63), "1000000TB"},
		{Seconds(0), "0"},
		{Seconds(1e-12), "1µs"},
		{Seconds(0.0351), "35.1ms"},
		{Seconds(59.96), "1m"},
		{Seconds(7265), "2h1m"},
		{Seconds(1e18), Seconds(1e9)},
		{PerSecond(0.001), "0"},
		{PerSecond(0.05), "0.05/s"},
		{PerSecond(12345), "12300/s"},
		{Percent(0), "0%"},
		{Percent(0.001), "<1%"},
		{Percent(1), "100%"},
	} {
		if tt.got != tt.want {
			t.Errorf("%q, want %q", tt.got, tt.want)
		}
	}
}
