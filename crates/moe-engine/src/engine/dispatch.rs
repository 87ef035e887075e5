//! Decides which data-parallel rank runs which request, and when it gets the request. This is plain data, separate from
//! the engines.
//!
//! A request waits here until a rank has room for it, and then goes to the rank with the least work. So a request that
//! has not started belongs to no rank. At the end of a run, ranks differ only by the requests that they run and by a
//! few that stand ready there. If all requests were given away when they are added, ranks would differ by the errors of
//! the estimated work, and by how much slower one rank is than another.
//!
//! The scheduling policy decides the order over all ranks ([`start_order`](super::start_order)), as each engine does
//! over its own requests.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::config::SchedulingPolicy;
use super::request::{Output, Request, RequestId};
use super::start_order::kept_for_the_end;

/// A request for a rank.
pub(super) struct Assigned {
    pub rank: usize,
    pub id: RequestId,
    /// How long it has waited.
    pub waited: Duration,
    pub request: Box<Request>,
}

/// The requests of all ranks that have not ended.
pub(super) struct Dispatcher {
    policy: SchedulingPolicy,
    /// The length of the longest sequence.
    max_model_len: usize,
    /// A rank that has fewer choices than this gets another request.
    room: usize,
    ranks: Vec<Load>,
    /// The first rank whose requests are kept until they end, because it may be lost.
    keeps_from: usize,
    waiting: BTreeMap<Turn, Waiting>,
    /// How many waiting requests are kept for the end: now, and at most.
    last: [usize; 2],
    /// The times at which waiting requests must end.
    deadlines: BTreeSet<(Instant, Turn)>,
    requests: HashMap<RequestId, Known>,
    /// The number of choices that have not ended.
    unfinished: usize,
    next_id: u64,
}

/// The work of a rank.
#[derive(Clone, Copy, Default)]
struct Load {
    /// The number of choices that have not ended.
    unfinished: usize,
    /// The largest number of tokens that these choices can reach.
    work: usize,
    /// Whether the rank was lost.
    lost: bool,
}

/// The position in the queue, lowest first. The fields are: whether the request is kept for the end, then its output
/// length (longest first), then the order of arrival.
type Turn = (bool, Reverse<usize>, u64);

struct Waiting {
    request: Box<Request>,
    added: Instant,
}

impl Waiting {
    fn deadline(&self) -> Option<Instant> {
        self.request.timeout.and_then(|timeout| self.added.checked_add(timeout))
    }
}

/// A request that has not ended.
struct Known {
    place: Place,
    /// Its choices that have not ended.
    unfinished: usize,
    /// The largest number of tokens that each of them can reach.
    work: usize,
    /// Number of tokens in its prompt.
    prompt: usize,
    /// The number of its choices, and which of them have ended.
    choices: usize,
    ended: BTreeSet<usize>,
    /// The choices that had ended when a rank was lost, and that another rank computes again with the others.
    repeated: BTreeSet<usize>,
    /// The request, and when it was added, as long as its rank may be lost.
    kept: Option<(Box<Request>, Instant)>,
    is_cancelled: bool,
}

impl Known {
    /// The choices that its rank computes.
    fn running(&self) -> usize {
        self.unfinished + self.repeated.len()
    }
}

/// What a lost rank leaves to the others.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Left {
    /// The choices that begin again.
    pub restarted: Vec<(RequestId, usize)>,
    /// The requests among them that had been cancelled.
    pub cancelled: Vec<RequestId>,
}

#[derive(Clone, Copy)]
enum Place {
    Waiting(Turn),
    Rank(usize),
}

impl Dispatcher {
    /// Makes a dispatcher for ranks that may each run `max_num_seqs` sequences. A single rank gets all requests at
    /// once. Several ranks get a quarter more than they can run; the additional requests stand ready for places that
    /// become free before the dispatcher can give others.
    pub fn new(
        policy: SchedulingPolicy,
        num_ranks: usize,
        max_num_seqs: usize,
        max_model_len: usize,
    ) -> Self {
        let room = match num_ranks {
            1 => usize::MAX,
            _ => max_num_seqs.saturating_add(max_num_seqs.div_ceil(4)),
        };
        Self {
            policy,
            max_model_len,
            room,
            ranks: vec![Load::default(); num_ranks],
            keeps_from: usize::MAX,
            waiting: BTreeMap::new(),
            last: [0, kept_for_the_end(max_num_seqs).saturating_mul(num_ranks)],
            deadlines: BTreeSet::new(),
            requests: HashMap::new(),
            unfinished: 0,
            next_id: 0,
        }
    }

    /// Keeps the requests of this rank and later ones, so that [`lose`](Self::lose) can give them to other ranks.
    pub fn keep_requests(&mut self, from: usize) {
        self.keeps_from = from;
    }

    /// The largest length of a sequence, prompt and output.
    pub fn max_model_len(&self) -> usize {
        self.max_model_len
    }

    /// Adds a request.
    pub fn add(&mut self, request: Request) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let most = self.max_model_len.saturating_sub(request.prompt.len());
        let output = request.max_tokens.map_or(most, |max| max.min(most));
        let turn = match self.policy {
            SchedulingPolicy::Fcfs => (false, Reverse(0), id.0),
            SchedulingPolicy::LongestFirst => (true, Reverse(output), id.0),
        };
        let unfinished = request.n;
        let prompt = request.prompt.len();
        let known = Known {
            place: Place::Waiting(turn),
            unfinished,
            work: prompt + output,
            prompt,
            choices: unfinished,
            ended: BTreeSet::new(),
            repeated: BTreeSet::new(),
            kept: None,
            is_cancelled: false,
        };
        let waiting = Waiting { request: Box::new(request), added: Instant::now() };
        self.deadlines.extend(waiting.deadline().map(|deadline| (deadline, turn)));
        self.waiting.insert(turn, waiting);
        self.requests.insert(id, known);
        self.unfinished += unfinished;
        self.last[0] += usize::from(turn.0);
        if self.last[0] > self.last[1] {
            self.release_longest();
        }
        id
    }

    /// Moves the longest request from the ones that are kept for the end to the ones that start in order of arrival.
    fn release_longest(&mut self) {
        let first_of_last = (true, Reverse(usize::MAX), 0);
        let Some((&turn, _)) = self.waiting.range(first_of_last..).next() else { return };
        let Some(waiting) = self.waiting.remove(&turn) else { return };
        let earlier = (false, Reverse(0), turn.2);
        if let Some(deadline) = waiting.deadline() {
            self.deadlines.remove(&(deadline, turn));
            self.deadlines.insert((deadline, earlier));
        }
        if let Some(known) = self.requests.get_mut(&RequestId(turn.2)) {
            known.place = Place::Waiting(earlier);
        }
        self.waiting.insert(earlier, waiting);
        self.last[0] -= 1;
    }

    /// The next request for a rank, if a rank has room. A request whose time is over is given away in any case: the
    /// rank then ends it like any other.
    pub fn next(&mut self, now: Instant) -> Option<Assigned> {
        let late = self.deadlines.first().filter(|(deadline, _)| *deadline <= now).map(|(_, turn)| *turn);
        let has_room = || self.ranks.iter().any(|rank| !rank.lost && rank.unfinished < self.room);
        let next = || self.waiting.first_key_value().map(|(turn, _)| *turn).filter(|_| has_room());
        let turn = late.or_else(next)?;
        self.assign(turn, now)
    }

    /// Gives a waiting request to a rank now.
    pub fn hurry(&mut self, id: RequestId) -> Option<Assigned> {
        match self.requests.get(&id)?.place {
            Place::Waiting(turn) => self.assign(turn, Instant::now()),
            Place::Rank(_) => None,
        }
    }

    /// The rank that runs a request; `None` if no rank does.
    pub fn rank_of(&self, id: RequestId) -> Option<usize> {
        match self.requests.get(&id)?.place {
            Place::Waiting(_) => None,
            Place::Rank(rank) => Some(rank),
        }
    }

    fn assign(&mut self, turn: Turn, now: Instant) -> Option<Assigned> {
        let load = |rank: &usize| (self.ranks[*rank].unfinished >= self.room, self.ranks[*rank].work);
        let rank = (0..self.ranks.len()).filter(|rank| !self.ranks[*rank].lost).min_by_key(load)?;
        let waiting = self.waiting.remove(&turn)?;
        if let Some(deadline) = waiting.deadline() {
            self.deadlines.remove(&(deadline, turn));
        }
        self.last[0] -= usize::from(turn.0);
        let id = RequestId(turn.2);
        let known = self.requests.get_mut(&id)?;
        known.place = Place::Rank(rank);
        known.kept = (rank >= self.keeps_from).then(|| (waiting.request.clone(), waiting.added));
        let load = &mut self.ranks[rank];
        load.unfinished += known.running();
        load.work = load.work.saturating_add(known.work.saturating_mul(known.running()));
        let waited = now.saturating_duration_since(waiting.added);
        Some(Assigned { rank, id, waited, request: waiting.request })
    }

    /// Notes what has ended.
    fn reported(&mut self, output: &Output) {
        if output.finish.is_none() {
            return;
        }
        let Some(known) = self.requests.get_mut(&output.request) else { return };
        if !known.repeated.remove(&output.choice) {
            if !known.ended.insert(output.choice) {
                return;
            }
            self.unfinished -= 1;
            known.unfinished -= 1;
        }
        if let Place::Rank(rank) = known.place {
            let load = &mut self.ranks[rank];
            load.unfinished -= 1;
            load.work = load.work.saturating_sub(known.work);
        }
        if known.running() == 0 {
            self.requests.remove(&output.request);
        }
    }

    /// Notes what has ended, and returns whether the output is new: not one of a choice that had ended before its rank
    /// was lost.
    pub fn report(&mut self, output: &Output) -> bool {
        let known = self.requests.get(&output.request);
        let is_repeated = known.is_some_and(|known| known.repeated.contains(&output.choice));
        self.reported(output);
        !is_repeated
    }

    /// Notes that a request was cancelled.
    pub fn cancelled(&mut self, id: RequestId) {
        if let Some(known) = self.requests.get_mut(&id) {
            known.is_cancelled = true;
        }
    }

    /// Takes the requests of a rank that was lost back to the front of the queue, in order of arrival. Their choices
    /// that have not ended begin again on other ranks.
    pub fn lose(&mut self, rank: usize) -> Left {
        self.ranks[rank] = Load { lost: true, ..Load::default() };
        self.take_back(|place| place == rank)
    }

    /// Takes the requests of all ranks back, and goes on with the ranks of `new`, which has no requests yet.
    pub fn move_to(&mut self, new: Self) -> Left {
        self.room = new.room;
        self.ranks = new.ranks;
        self.last[1] = new.last[1];
        self.take_back(|_| true)
    }

    fn take_back(&mut self, is_lost: impl Fn(usize) -> bool) -> Left {
        let mut left = Left::default();
        for (&id, known) in &mut self.requests {
            if !matches!(known.place, Place::Rank(place) if is_lost(place)) {
                continue;
            }
            let Some((request, added)) = known.kept.take() else { continue };
            let turn = (false, Reverse(0), id.0);
            known.place = Place::Waiting(turn);
            known.repeated.clone_from(&known.ended);
            let unfinished = (0..known.choices).filter(|choice| !known.ended.contains(choice));
            left.restarted.extend(unfinished.map(|choice| (id, choice)));
            left.cancelled.extend(known.is_cancelled.then_some(id));
            let waiting = Waiting { request, added };
            self.deadlines.extend(waiting.deadline().map(|deadline| (deadline, turn)));
            self.waiting.insert(turn, waiting);
        }
        left
    }

    /// The length of the prompt of a request of which this rank still computes choice `choice`; `None` if there is
    /// none.
    pub fn prompt_of(&self, rank: usize, request: RequestId, choice: usize) -> Option<usize> {
        let known = self.requests.get(&request)?;
        let runs = matches!(known.place, Place::Rank(place) if place == rank);
        let has_ended = known.ended.contains(&choice) && !known.repeated.contains(&choice);
        (runs && choice < known.choices && !has_ended).then_some(known.prompt)
    }

    /// Choices that wait or run.
    pub fn num_unfinished(&self) -> usize {
        self.unfinished
    }

    /// Whether a rank has a request that has not ended.
    pub fn is_busy(&self, rank: usize) -> bool {
        self.ranks[rank].unfinished > 0
    }

    /// Whether every request has ended.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;
