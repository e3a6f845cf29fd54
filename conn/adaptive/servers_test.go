package adaptive

import "math"

func constant(x float64) func(*sim) float64 { return func(*sim) float64 { return x } }

func exponential(mean float64) func(*sim) float64 {
	return func(s *sim) float64 { return s.rng.ExpFloat64() * mean }
}

// lognormal has a coefficient of variation.
func lognormal(mean, cv float64) func(*sim) float64 {
	variance := math.Log(1 + cv*cv)
	mu := math.Log(mean) - variance/2
	return func(s *sim) float64 { return math.Exp(mu + math.Sqrt(variance)*s.rng.NormFloat64()) }
}

var (
	pool     = server{workers: 32}
	database = server{sigma: 0.02, kappa: 0.0005} // knee at about 42
)

// servers are those for which the controller was made. The right static cap is the smallest that gives 99 % of the
// goodput of the best one.
func servers() []world {
	all := []world{
		{name: "workers", server: pool, work: exponential(0.02), arrivals: constant(3200), rights: []int{36}, target: 0.04},
		{name: "slow workers", server: server{workers: 8}, work: lognormal(0.1, 1.5), arrivals: constant(120), wait: 1, deadline: 3, rights: []int{9}, target: 0.2},
		{name: "plc", server: server{workers: 1}, work: constant(0.05), rtt: constant(0.002), arrivals: constant(24), wait: 1, deadline: 3, rights: []int{2}, target: 0.1},
		{name: "database", server: database, work: exponential(0.01), arrivals: constant(3200), rights: []int{42}, target: 0.06},
		{name: "collapsing database", server: server{sigma: 0.02, kappa: 0.003}, work: exponential(0.01), arrivals: constant(2000), rights: []int{17}, target: 0.04},
		{name: "pauses", server: pool, work: exponential(0.02), arrivals: constant(2000), rights: []int{36}, target: 0.04, changes: []change{
			{5, 5, func(sv *server, _ *sim) { sv.speed = 0 }},
			{5.2, 5, func(sv *server, _ *sim) { sv.speed = 1 }},
		}},
		{name: "drift 2x", server: pool, work: exponential(0.02), arrivals: constant(2400), length: 7200, rights: []int{36}, target: 0.04, changes: []change{
			{1, 1, func(sv *server, s *sim) {
				slower := s.now / 3600
				sv.speed = 1 / (1 + min(slower, 2-slower))
			}},
		}},
		{name: "half the workers lost", server: pool, work: exponential(0.02), arrivals: constant(2400), events: []float64{400, 800}, rights: []int{36, 18, 36}, target: 0.04, changes: []change{
			{400, 0, func(sv *server, s *sim) { sv.workers = 16; s.kill(len(sv.running) - 16) }},
			{800, 0, func(sv *server, _ *sim) { sv.workers = 32 }},
		}},
		{name: "database at half speed", server: database, work: exponential(0.01), arrivals: constant(3200), events: []float64{400, 800}, rights: []int{42, 42, 42}, target: 0.06, changes: []change{
			{400, 0, func(sv *server, _ *sim) { sv.speed = 0.5 }},
			{800, 0, func(sv *server, _ *sim) { sv.speed = 1 }},
		}},
		{name: "bimodal", server: pool, arrivals: constant(2600), events: []float64{400, 800}, rights: []int{35, 35, 35}, target: 0.05, work: func(s *sim) float64 {
			long := 0.1
			if s.now > 400 && s.now < 800 {
				long = 0.25
			}
			if s.rng.Float64() < long {
				return 0.2
			}
			return 0.005
		}},
		{name: "cold cache", server: pool, work: exponential(0.02), arrivals: constant(2400), events: []float64{400}, rights: []int{36, 36}, target: 0.04, changes: []change{
			{400, 1, func(sv *server, s *sim) { sv.speed = 1 / (1 + 4*math.Exp(-(s.now-400)/60)) }},
		}},
		{
			name: "round trips flip", server: server{workers: 16}, work: exponential(0.005), arrivals: constant(4800), events: []float64{240, 480, 720, 960}, rights: []int{104, 244, 104, 244, 104}, target: 0.05,
			rtt: func(s *sim) float64 {
				return 0.02 + 0.04*float64(int(s.now/240)%2) + 0.002*math.Exp(s.rng.NormFloat64())
			},
		},
		{name: "batches", server: pool, work: exponential(0.02), arrivals: constant(300), batch: 600, rights: []int{29}, target: 0.04},
		{name: "antagonist", server: database, work: exponential(0.01), arrivals: constant(3200), rights: []int{44}, target: 0.06, changes: []change{
			{30, 30, func(sv *server, s *sim) { sv.others = s.rng.IntN(21) }},
		}},
		{name: "accepts 48", server: server{workers: 32, most: 48}, work: exponential(0.02), arrivals: constant(2400), rights: []int{36}, target: 0.04},
		{name: "ghosts", server: pool, work: lognormal(0.1, 2), arrivals: constant(480), deadline: 0.6, ghosts: true, retries: 2, rights: []int{21}, target: 0.2},
		{name: "ghosts held", server: pool, work: lognormal(0.1, 2), arrivals: constant(480), deadline: 0.6, retries: 2, rights: []int{31}, target: 0.2},
		{name: "lock storm", server: database, work: exponential(0.01), arrivals: constant(3200), events: []float64{400, 800}, rights: []int{42, 15, 42}, target: 0.06, changes: []change{
			{400, 0, func(sv *server, _ *sim) { sv.kappa = 0.01 }},
			{800, 0, func(sv *server, _ *sim) { sv.kappa = 0.0005 }},
		}},
		{name: "rival", server: server{sigma: 0.02, kappa: 0.0005, others: 20}, work: exponential(0.01), arrivals: constant(3200), rights: []int{49}, target: 0.06},
		{name: "60 clients, lock storm", server: database, work: exponential(0.05), clients: 60, think: 0.1, wait: 1, deadline: 3, events: []float64{400, 800}, rights: []int{42, 15, 42}, target: 0.3, changes: []change{
			{400, 0, func(sv *server, _ *sim) { sv.kappa = 0.01 }},
			{800, 0, func(sv *server, _ *sim) { sv.kappa = 0.0005 }},
		}},
		{name: "slow pool, half lost", server: pool, work: exponential(0.1), arrivals: constant(480), wait: 1, deadline: 3, events: []float64{400, 800}, rights: []int{36, 18, 36}, target: 0.2, changes: []change{
			{400, 0, func(sv *server, s *sim) { sv.workers = 16; s.kill(len(sv.running) - 16) }},
			{800, 0, func(sv *server, _ *sim) { sv.workers = 32 }},
		}},
		{name: "slow database, lock storm", server: database, work: exponential(0.05), arrivals: constant(480), wait: 1, deadline: 3, events: []float64{400, 800}, rights: []int{42, 15, 42}, target: 0.3, changes: []change{
			{400, 0, func(sv *server, _ *sim) { sv.kappa = 0.01 }},
			{800, 0, func(sv *server, _ *sim) { sv.kappa = 0.0005 }},
		}},
		{name: "two gates, database", server: database, work: exponential(0.01), arrivals: constant(3200), gates: 2, rights: []int{21}, target: 0.06},
		{name: "two gates, workers", server: pool, work: exponential(0.02), arrivals: constant(3200), gates: 2, rights: []int{19}, target: 0.04},
		{name: "light load", server: pool, work: exponential(0.02), arrivals: constant(800), rights: []int{40}, target: 0.04},
	}
	for i := range all {
		all[i].complete()
	}
	return all
}

// days are servers over 24 hours.
func days() []world {
	const day = 86400
	all := []world{
		{name: "workers, 24 h", server: pool, work: exponential(0.2), arrivals: constant(240), rights: []int{34}, target: 0.4},
		{name: "database, 24 h", server: database, work: exponential(0.1), arrivals: constant(240), rights: []int{42}, target: 0.6},
		// Data that grow by 60 %, a job at 3:00 that takes half of the speed for an hour, and a pause each minute.
		{
			name: "a day's life", server: pool, work: lognormal(0.2, 1.2), rights: []int{36}, target: 0.4,
			arrivals: func(s *sim) float64 { return 260 * (0.55 - 0.45*math.Cos(2*math.Pi*s.now/day)) },
			changes: []change{
				{0, 0.5, func(sv *server, s *sim) {
					sv.speed = 1 / (1 + 0.6*s.now/day)
					if h := s.now / 3600; h > 3 && h < 4 {
						sv.speed /= 2
					}
					if math.Mod(s.now, 60) < 0.5 {
						sv.speed = 0
					}
				}},
			},
		},
	}
	for i := range all {
		all[i].length, all[i].wait, all[i].deadline = day, 1, 3
		all[i].complete()
	}
	return all
}

func (w *world) complete() {
	if w.length == 0 {
		w.length = 1200
	}
	if w.wait == 0 {
		w.wait = 0.5
	}
	if w.deadline == 0 {
		w.deadline = 1
	}
	if w.rtt == nil {
		w.rtt = constant(0.001)
	}
}
