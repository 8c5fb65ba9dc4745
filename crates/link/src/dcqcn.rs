//! DCQCN congestion control: a sender reduces its rate when switches mark its packets.
//!
//! Source: Zhu et al., "Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015; sections and
//! equations below are that paper's. A congested switch marks packets (ECN). The receiver, the *notification
//! point*, answers marked packets with congestion notification packets (CNP, annex A17.9.3). The sender, the
//! *reaction point*, reduces its rate at each CNP and increases it while none arrives. There are no sockets
//! and no clock: time is an argument, counted from any origin.

use std::time::Duration;

use millstream_quantity::BytesPerSecond;

/// Parameters of a reaction point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// R_max, the rate of a flow without congestion; the paper's line rate.
    pub line_rate: BytesPerSecond,
    /// Lowest rate of a flow.
    pub min_rate: BytesPerSecond,
    /// Weight of a CNP in the congestion estimate.
    pub g: f64,
    /// The congestion estimate decreases after each such interval without a CNP.
    pub alpha_timer: Duration,
    /// T: the rate increases after each such interval.
    pub rate_timer: Duration,
    /// B: the rate increases after this many bytes.
    pub byte_counter: u64,
    /// F: steps of fast recovery.
    pub fast_recovery: u32,
    /// R_AI: step of additive increase.
    pub additive: BytesPerSecond,
    /// R_HAI: step of hyper increase.
    pub hyper: BytesPerSecond,
}

impl Parameters {
    /// The paper's parameters (section 5.2, figure 14), scaled to a line rate: g = 1/256, T = 55 µs, B = 10
    /// MB, F = 5, R_AI = 40 Mb/s at 40 Gb/s. The paper gives no R_HAI; it is ten times R_AI here.
    #[must_use]
    pub fn from_paper(line_rate: BytesPerSecond) -> Self {
        let additive = BytesPerSecond(line_rate.0 / 1000.0);
        Self {
            line_rate,
            min_rate: additive,
            g: 1.0 / 256.0,
            alpha_timer: Duration::from_micros(55),
            rate_timer: Duration::from_micros(55),
            byte_counter: 10_000_000,
            fast_recovery: 5,
            additive,
            hyper: BytesPerSecond(10.0 * additive.0),
        }
    }
}

/// Timers of a reaction point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timer {
    /// When no CNP arrived for `alpha_timer`: the congestion estimate decreases.
    Alpha,
    /// When no CNP arrived for `rate_timer`: the rate increases.
    Rate,
}

/// A sender's rate towards one destination (section 3.1, RP algorithm).
#[derive(Clone, Debug)]
pub struct ReactionPoint {
    parameters: Parameters,
    /// R_C, the current rate in bytes per second.
    current: f64,
    /// R_T, the target rate in bytes per second.
    target: f64,
    /// Congestion estimate, from 0 to 1.
    alpha: f64,
    /// State of a flow below the line rate; `None` at the line rate.
    reduced: Option<ReducedRate>,
    /// Time of the last decrease of the congestion estimate before the flow returned to the line rate.
    recovered: Option<Duration>,
    /// The time at which the next byte may be sent.
    free: Duration,
}

#[derive(Clone, Copy, Debug)]
struct ReducedRate {
    next_alpha: Duration,
    next_rate: Duration,
    /// Bytes since the byte counter last expired.
    bytes: u64,
    /// Expiries of the timer and of the byte counter since the last CNP.
    timer_steps: u32,
    byte_steps: u32,
}

impl ReactionPoint {
    /// A flow at the line rate (section 3.1: "flows start at line rate").
    #[must_use]
    pub fn new(parameters: Parameters) -> Self {
        let line = parameters.line_rate.0;
        Self {
            parameters,
            current: line,
            target: line,
            alpha: 1.0,
            reduced: None,
            recovered: None,
            free: Duration::ZERO,
        }
    }

    /// The current rate.
    #[must_use]
    pub fn rate(&self) -> BytesPerSecond {
        BytesPerSecond(self.current)
    }

    /// The congestion estimate, from 0 to 1.
    #[must_use]
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// Handles a CNP (equation 1).
    pub fn handle_cnp(&mut self, now: Duration) {
        self.handle_timeout(now);
        let p = &self.parameters;
        if let Some(since) = self.recovered.take() {
            // Equation 2, for all intervals that passed without a timer.
            let times = now.saturating_sub(since).as_nanos() / p.alpha_timer.as_nanos().max(1);
            self.alpha *= (1.0 - p.g).powi(i32::try_from(times).unwrap_or(i32::MAX));
        }
        self.target = self.current;
        self.current = (self.current * (1.0 - self.alpha / 2.0)).max(p.min_rate.0);
        self.alpha = (1.0 - p.g) * self.alpha + p.g;
        self.reduced = Some(ReducedRate {
            next_alpha: now + p.alpha_timer,
            next_rate: now + p.rate_timer,
            bytes: 0,
            timer_steps: 0,
            byte_steps: 0,
        });
    }

    /// Accounts for sent bytes, which take their time at the current rate (see [`ReactionPoint::poll_send`]).
    pub fn handle_sent(&mut self, bytes: usize, now: Duration) {
        self.handle_timeout(now);
        self.free = self.free.max(now) + Duration::from_secs_f64(bytes as f64 / self.current);
        let every = self.parameters.byte_counter;
        let Some(reduced) = &mut self.reduced else { return };
        reduced.bytes += bytes as u64;
        let steps = reduced.bytes / every;
        reduced.bytes %= every;
        for _ in 0..steps {
            if let Some(reduced) = &mut self.reduced {
                reduced.byte_steps = reduced.byte_steps.saturating_add(1);
            }
            self.increase();
        }
    }

    /// The time at which the next bytes may be sent. A sender of many small packets may send a burst ahead
    /// and wait after it.
    #[must_use]
    pub fn poll_send(&self) -> Duration {
        self.free
    }

    /// The time at which [`handle_timeout`](ReactionPoint::handle_timeout) is due; `None` at the line rate.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Duration> {
        self.next().map(|(time, _)| time)
    }

    /// Handles the timers that expired at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        while let Some((_, timer)) = self.next().filter(|(time, _)| *time <= now) {
            let Some(reduced) = &mut self.reduced else { return };
            match timer {
                // Equation 2.
                Timer::Alpha => {
                    reduced.next_alpha += self.parameters.alpha_timer;
                    self.alpha *= 1.0 - self.parameters.g;
                }
                Timer::Rate => {
                    reduced.next_rate += self.parameters.rate_timer;
                    reduced.timer_steps = reduced.timer_steps.saturating_add(1);
                    self.increase();
                }
            }
        }
    }

    fn next(&self) -> Option<(Duration, Timer)> {
        let reduced = self.reduced?;
        Some(if reduced.next_alpha <= reduced.next_rate {
            (reduced.next_alpha, Timer::Alpha)
        } else {
            (reduced.next_rate, Timer::Rate)
        })
    }

    /// One increase (section 3.1, figure 7): fast recovery while both counts are below F, hyper increase when
    /// both are above, additive increase otherwise.
    fn increase(&mut self) {
        let Some(reduced) = self.reduced else { return };
        let p = &self.parameters;
        let (lower, upper) =
            (reduced.timer_steps.min(reduced.byte_steps), reduced.timer_steps.max(reduced.byte_steps));
        if lower > p.fast_recovery {
            // Equation 4, by the number of hyper increases.
            self.target += p.hyper.0 * f64::from(lower - p.fast_recovery);
        } else if upper >= p.fast_recovery {
            self.target += p.additive.0;
        }
        self.target = self.target.min(p.line_rate.0);
        // Equation 3.
        self.current = f64::midpoint(self.target, self.current).min(p.line_rate.0);
        if self.current > p.line_rate.0 * 0.9999 {
            self.recovered = Some(reduced.next_alpha.saturating_sub(p.alpha_timer));
            (self.current, self.target, self.reduced) = (p.line_rate.0, p.line_rate.0, None);
        }
    }
}

/// A receiver's side of one flow (section 3.1, NP algorithm).
#[derive(Clone, Copy, Debug, Default)]
pub struct NotificationPoint {
    last: Option<Duration>,
}

impl NotificationPoint {
    /// N: smallest interval between two CNPs.
    pub const INTERVAL: Duration = Duration::from_micros(50);

    /// Handles a packet; returns whether to send a CNP to its sender.
    #[must_use]
    pub fn handle_packet(&mut self, congestion_experienced: bool, now: Duration) -> bool {
        let due = self.last.is_none_or(|last| now.saturating_sub(last) >= Self::INTERVAL);
        let send = congestion_experienced && due;
        if send {
            self.last = Some(now);
        }
        send
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LINE: f64 = 5e9;

    fn micros(n: u64) -> Duration {
        Duration::from_micros(n)
    }

    fn flow() -> ReactionPoint {
        ReactionPoint::new(Parameters::from_paper(BytesPerSecond(LINE)))
    }

    #[test]
    fn first_cnp_halves_the_rate() {
        let mut flow = flow();
        assert_eq!((flow.rate().0, flow.poll_timeout()), (LINE, None));
        flow.handle_cnp(micros(1));
        assert_eq!(flow.rate().0, LINE / 2.0);
        assert_eq!(flow.alpha(), 1.0);
    }

    #[test]
    fn fast_recovery_approaches_the_old_rate() {
        let mut flow = flow();
        flow.handle_cnp(Duration::ZERO);
        let mut expected = LINE / 2.0;
        for step in 1..=4 {
            flow.handle_timeout(micros(55 * step));
            expected = f64::midpoint(expected, LINE);
            assert_eq!(flow.rate().0, expected, "step {step}");
        }
    }

    #[test]
    fn additive_then_hyper_increase() {
        let mut flow = flow();
        // Many CNPs, so that the target is far from the line rate.
        (0..20).for_each(|_| flow.handle_cnp(Duration::ZERO));
        let target = flow.target;
        // Both timer and byte counter, so that the lower count exceeds F.
        let mut now = Duration::ZERO;
        let mut targets = Vec::new();
        for _ in 0..8 {
            now += micros(55);
            flow.handle_timeout(now);
            flow.handle_sent(10_000_000, now);
            targets.push(((flow.target - target) / flow.parameters.additive.0).round());
        }
        // Step 5 (two events; the first leaves the other count at 4), step 6, then hyper increase: 10, 20 …
        assert_eq!(targets, [0.0, 0.0, 0.0, 0.0, 2.0, 13.0, 43.0, 93.0]);
    }

    #[test]
    fn recovered_flow_has_no_timer() {
        let mut flow = flow();
        flow.handle_cnp(Duration::ZERO);
        flow.handle_timeout(Duration::from_secs(1));
        assert_eq!((flow.rate().0, flow.poll_timeout()), (LINE, None));
    }

    #[test]
    fn congestion_estimate_decays() {
        let mut flow = flow();
        flow.handle_cnp(Duration::ZERO);
        let late = Duration::from_secs(1);
        flow.handle_timeout(late);
        flow.handle_cnp(late);
        // After 18,181 decreases by 255/256 the old estimate is zero.
        assert!(flow.rate().0 > LINE * 0.999);
        assert!((flow.alpha() - 1.0 / 256.0).abs() < 1e-6);
    }

    #[test]
    fn two_flows_converge_to_fair_shares() {
        // A switch that marks as in section 5.2 (K_min 5 KB, K_max 200 KB, P_max 1 %), and two flows. One
        // starts at the line rate.
        let (mut a, mut b) = (flow(), flow());
        (0..8).for_each(|_| b.handle_cnp(Duration::ZERO));
        let (mut queue, mut points) = (0.0_f64, [NotificationPoint::default(); 2]);
        let (mut sums, mut random) = ([0.0; 2], 1u64);
        let step = micros(5);
        let seconds = step.as_secs_f64();
        for turn in 0..200_000u32 {
            let now = step * turn;
            queue = (queue + (a.rate().0 + b.rate().0 - LINE) * seconds).max(0.0);
            let marks = if queue > 200e3 { 1.0 } else { ((queue - 5e3) / 195e3 * 0.01).max(0.0) };
            for (i, flow) in [&mut a, &mut b].into_iter().enumerate() {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let drawn = (random >> 11) as f64 / (1u64 << 53) as f64;
                let packets = flow.rate().0 * seconds / 4096.0;
                if points[i].handle_packet(drawn > (1.0_f64 - marks).powf(packets), now) {
                    flow.handle_cnp(now);
                }
                flow.handle_sent((flow.rate().0 * seconds) as usize, now);
                if turn > 100_000 {
                    sums[i] += flow.rate().0 * seconds;
                }
            }
        }
        let total = (sums[0] + sums[1]) / (LINE * 0.5);
        assert!((0.7..1.1).contains(&total), "utilisation {total}");
        assert!((0.6..1.7).contains(&(sums[0] / sums[1])), "shares {sums:?}");
    }

    #[derive(Clone, Debug)]
    enum Event {
        Cnp,
        Sent(usize),
        Timeout,
    }

    fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
        let event =
            prop_oneof![Just(Event::Cnp), (0usize..30_000_000).prop_map(Event::Sent), Just(Event::Timeout)];
        proptest::collection::vec((0u64..2_000, event), 1..300)
    }

    proptest! {
        #[test]
        fn rates_stay_in_bounds_and_only_cnps_reduce_them(events in events()) {
            let mut flow = flow();
            let mut now = Duration::ZERO;
            for (gap, event) in events {
                now += micros(gap);
                flow.handle_timeout(now);
                let before = flow.rate().0;
                match event {
                    Event::Cnp => {
                        flow.handle_cnp(now);
                        prop_assert!(flow.rate().0 <= before);
                        prop_assert!(flow.rate().0 >= before / 2.0);
                    }
                    Event::Sent(bytes) => {
                        flow.handle_sent(bytes, now);
                        prop_assert!(flow.rate().0 >= before);
                    }
                    Event::Timeout => {}
                }
                let p = flow.parameters;
                prop_assert!((p.min_rate.0..=p.line_rate.0).contains(&flow.rate().0), "{}", flow.rate().0);
                prop_assert!((0.0..=1.0).contains(&flow.alpha()));
                prop_assert!(flow.poll_timeout().is_none_or(|time| time > now));
            }
            flow.handle_timeout(now + Duration::from_secs(60));
            prop_assert_eq!(flow.rate().0, LINE);
        }

        #[test]
        fn cnps_keep_their_interval(gaps in proptest::collection::vec(0u64..100, 1..500)) {
            let mut point = NotificationPoint::default();
            let (mut now, mut last) = (Duration::ZERO, None);
            for gap in gaps {
                now += micros(gap);
                prop_assert!(!point.handle_packet(false, now));
                let due = last.is_none_or(|last| now - last >= NotificationPoint::INTERVAL);
                prop_assert_eq!(point.handle_packet(true, now), due);
                if due {
                    last = Some(now);
                }
            }
        }

        #[test]
        fn sent_bytes_take_their_time(sizes in proptest::collection::vec(1usize..100_000, 1..100)) {
            let mut flow = flow();
            let total: usize = sizes.iter().sum();
            for size in sizes {
                let now = flow.poll_send();
                flow.handle_sent(size, now);
            }
            let expected = total as f64 / LINE;
            prop_assert!((flow.poll_send().as_secs_f64() - expected).abs() < 1e-6);
        }
    }
}
