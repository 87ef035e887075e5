//! When the tokens of many requests arrive: exact percentiles, in milliseconds.

use std::time::Duration;

use serde::Serialize;

/// The times at which tokens arrive, each since the beginning of the run.
pub struct Arrivals {
    /// The last token of each request; `None` before its first.
    last: Vec<Option<Duration>>,
    to_first: Vec<Duration>,
    between: Vec<Duration>,
}

impl Arrivals {
    /// For `requests` requests, before any token has arrived.
    pub fn new(requests: usize) -> Self {
        Self { last: vec![None; requests], to_first: Vec::with_capacity(requests), between: Vec::new() }
    }

    /// Notes that a token of a request arrived at this time.
    pub fn add(&mut self, request: usize, now: Duration) {
        match self.last[request].replace(now) {
            None => self.to_first.push(now),
            Some(last) => self.between.push(now.saturating_sub(last)),
        }
    }

    /// Tokens that have come.
    pub fn tokens(&self) -> usize {
        self.to_first.len() + self.between.len()
    }

    /// The distribution of the times from the beginning of the run to the first token of each request, and of the times
    /// between tokens. `None` if there are none.
    pub fn spreads(self) -> (Option<Spread>, Option<Spread>) {
        (Spread::of(self.to_first), Spread::of(self.between))
    }
}

/// The distribution of times, in milliseconds. Percentiles are by nearest rank, so each is a measured time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Their mean.
    pub mean: f64,
    /// Half of them are at most this.
    pub p50: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Spread {
    fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let ms = |time: &Duration| time.as_secs_f64() * 1e3;
        let percentile = |percent: usize| times.get((times.len() * percent).div_ceil(100) - 1).map(ms);
        let max = ms(times.last()?);
        let mean = times.iter().map(ms).sum::<f64>() / times.len() as f64;
        Some(Self { mean, p50: percentile(50)?, p99: percentile(99)?, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn percentiles_are_measured_times() {
        assert_eq!(Spread::of(Vec::new()), None);
        let spread = |times: &[u64]| Spread::of(times.iter().map(|n| ms(*n)).collect()).unwrap();
        assert_eq!(spread(&[7]), Spread { mean: 7., p50: 7., p99: 7., max: 7. });
        assert_eq!(spread(&[4, 1, 3, 2]), Spread { mean: 2.5, p50: 2., p99: 4., max: 4. });
        let hundred: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(spread(&hundred), Spread { mean: 50.5, p50: 50., p99: 99., max: 100. });
    }

    #[test]
    fn the_first_token_counts_from_the_start_and_others_from_the_one_before() {
        let mut arrivals = Arrivals::new(3);
        for (request, now) in [(0, 10), (1, 20), (0, 15), (1, 50), (2, 60), (0, 20)] {
            arrivals.add(request, ms(now));
        }
        assert_eq!(arrivals.tokens(), 6);
        let (first, between) = arrivals.spreads();
        assert_eq!(first, Some(Spread { mean: 30., p50: 20., p99: 60., max: 60. }));
        let between = between.unwrap();
        assert_eq!((between.p50, between.max), (5., 30.));
        assert!((between.mean - 40. / 3.).abs() < 1e-9);
    }
}
