//! The lines that wait for the engine, and which of them is next: after a prompt comes the one that shares most of it.
//! So the prefix cache holds a shared prefix until all lines of the window have used it. This order walks the tree of
//! prefixes depth first. With it, a cache that has room for one prompt computes each prefix only once.

use super::entries::Key;
use super::job::Job;

/// A line goes next after this number of windows of others, whatever it shares.
const PATIENCE: u64 = 4;

/// A line that can be answered.
pub struct Upcoming {
    /// Its number, from 1.
    pub number: u64,
    /// The identity of its record.
    pub key: Key,
    /// A hash of the request, if every answer to it is the same.
    pub repeats: Option<u64>,
    /// Its requests.
    pub job: Box<Job>,
}

impl Upcoming {
    fn choices(&self) -> usize {
        self.job.requests.len() * self.job.form.n
    }

    /// The prompt that counts; a line may have several.
    fn prompt(&self) -> &[u32] {
        self.job.requests.first().map_or(&[], |request| &request.prompt)
    }
}

struct Waiting {
    /// How often a line was added and taken before this one was added.
    added: u64,
    taken: u64,
    line: Box<Upcoming>,
}

/// The lines, at most about `capacity` choices.
pub struct Window {
    /// In the order of their prompts, so that the ones that share most with a prompt stand next to its place.
    lines: Vec<Waiting>,
    choices: usize,
    capacity: usize,
    /// Tokens of a KV block; `None` if prompts share no blocks, and lines start in the order of the input.
    block_size: Option<usize>,
    /// The prompt that was taken last.
    last: Vec<u32>,
    added: u64,
    taken: u64,
}

impl Window {
    /// An empty window.
    pub fn new(capacity: usize, block_size: Option<usize>) -> Self {
        Self { lines: Vec::new(), choices: 0, capacity, block_size, last: Vec::new(), added: 0, taken: 0 }
    }

    /// The number of choices from which on it is full.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether it has enough lines.
    pub fn is_full(&self) -> bool {
        self.choices >= self.capacity
    }

    /// Whether it has no lines.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Adds a line.
    pub fn add(&mut self, line: Upcoming) {
        self.choices += line.choices();
        let place = self.lines.partition_point(|other| other.line.prompt() <= line.prompt());
        let waiting = Waiting { added: self.added, taken: self.taken, line: Box::new(line) };
        self.lines.insert(place, waiting);
        self.added += 1;
    }

    /// Takes the next line.
    pub fn take(&mut self) -> Option<Upcoming> {
        let (oldest, first) = self.lines.iter().enumerate().min_by_key(|(_, waiting)| waiting.added)?;
        let is_late = self.taken - first.taken >= PATIENCE * self.capacity as u64;
        let next = self.nearest().filter(|_| !is_late).unwrap_or(oldest);
        let line = *self.lines.remove(next).line;
        self.choices -= line.choices();
        self.last.clear();
        self.last.extend_from_slice(line.prompt());
        self.taken += 1;
        Some(line)
    }

    /// The line that shares the most blocks with the last one, if one shares any.
    fn nearest(&self) -> Option<usize> {
        let block_size = self.block_size?;
        let place = self.lines.partition_point(|waiting| waiting.line.prompt() < &self.last[..]);
        let shared = |place: usize| {
            let blocks = self.lines[place].line.prompt().chunks_exact(block_size);
            blocks.zip(self.last.chunks_exact(block_size)).take_while(|(a, b)| a == b).count()
        };
        let neighbours = place.saturating_sub(1)..self.lines.len().min(place + 1);
        neighbours.filter(|&place| shared(place) > 0).max_by_key(|&place| shared(place))
    }
}

#[cfg(test)]
mod tests {
    use super::super::known::request_id;
    use super::super::tests::parser;
    use super::*;
    use serde_json::json;

    /// A line whose prompt is a group's prefix of eight tokens and a token of its own.
    fn line(number: u64, group: u32) -> Upcoming {
        let prompt: Vec<u32> = [vec![group; 8], vec![number as u32]].concat();
        let line = json!({"url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 1}});
        let job = Box::new(parser().parse(line.as_object().unwrap(), "a").unwrap());
        let key = Key { id: request_id(number), custom_id: None, request: None };
        Upcoming { number, key, repeats: None, job }
    }

    fn order(window: &mut Window, groups: &[u32]) -> Vec<u64> {
        (0..).zip(groups).for_each(|(number, group)| window.add(line(number, *group)));
        std::iter::from_fn(|| window.take()).map(|line| line.number).collect()
    }

    #[test]
    fn lines_that_share_a_prefix_follow_each_other() {
        let groups = [5, 3, 9, 3, 5, 9, 3, 5];
        assert_eq!(order(&mut Window::new(8, Some(4)), &groups), [0, 4, 7, 1, 3, 6, 2, 5]);
        let alone: Vec<u64> = (0..8).collect();
        assert_eq!(order(&mut Window::new(8, None), &groups), alone);
        assert_eq!(order(&mut Window::new(8, Some(16)), &groups), alone, "no block is shared");
        assert_eq!(order(&mut Window::new(8, Some(4)), &[8, 7, 6, 5, 4, 3, 2, 1]), alone);
    }

    #[test]
    fn no_line_waits_for_ever() {
        let mut window = Window::new(2, Some(4));
        window.add(line(0, 1));
        window.take().unwrap();
        window.add(line(1, 9));
        let taken = (2..100).map(|number| {
            window.add(line(number, 1));
            window.take().unwrap().number
        });
        assert_eq!(taken.take_while(|&number| number != 1).count(), 8, "four windows of two lines");
    }

    #[test]
    fn the_window_counts_choices() {
        let mut window = Window::new(3, None);
        (0..3).for_each(|number| {
            assert!(!window.is_full());
            window.add(line(number, 1));
        });
        assert!(window.is_full());
        window.take().unwrap();
        assert!(!window.is_full() && !window.is_empty());
    }
}
