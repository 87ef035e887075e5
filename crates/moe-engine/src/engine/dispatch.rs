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
            waiting: BTreeMap::new(),
            last: [0, kept_for_the_end(max_num_seqs).saturating_mul(num_ranks)],
            deadlines: BTreeSet::new(),
            requests: HashMap::new(),
            unfinished: 0,
            next_id: 0,
        }
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
        let has_room = || self.ranks.iter().any(|rank| rank.unfinished < self.room);
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
        let rank = (0..self.ranks.len()).min_by_key(load)?;
        let waiting = self.waiting.remove(&turn)?;
        if let Some(deadline) = waiting.deadline() {
            self.deadlines.remove(&(deadline, turn));
        }
        self.last[0] -= usize::from(turn.0);
        let id = RequestId(turn.2);
        let known = self.requests.get_mut(&id)?;
        known.place = Place::Rank(rank);
        let load = &mut self.ranks[rank];
        load.unfinished += known.unfinished;
        load.work = load.work.saturating_add(known.work.saturating_mul(known.unfinished));
        let waited = now.saturating_duration_since(waiting.added);
        Some(Assigned { rank, id, waited, request: waiting.request })
    }

    /// Notes what has ended.
    pub fn reported(&mut self, output: &Output) {
        if output.finish.is_none() {
            return;
        }
        let Some(known) = self.requests.get_mut(&output.request) else { return };
        if !known.ended.insert(output.choice) {
            return;
        }
        self.unfinished -= 1;
        known.unfinished -= 1;
        if let Place::Rank(rank) = known.place {
            let load = &mut self.ranks[rank];
            load.unfinished -= 1;
            load.work = load.work.saturating_sub(known.work);
        }
        if known.unfinished == 0 {
            self.requests.remove(&output.request);
        }
    }

    /// The length of the prompt of a request that this rank runs and whose choice `choice` has not ended; `None` if
    /// there is none.
    pub fn prompt_of(&self, rank: usize, request: RequestId, choice: usize) -> Option<usize> {
        let known = self.requests.get(&request)?;
        let runs = matches!(known.place, Place::Rank(place) if place == rank);
        (runs && choice < known.choices && !known.ended.contains(&choice)).then_some(known.prompt)
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
mod tests {
    use super::super::request::FinishReason;
    use super::*;

    const FCFS: SchedulingPolicy = SchedulingPolicy::Fcfs;

    fn request(prompt: usize, max_tokens: usize) -> Request {
        Request { max_tokens: Some(max_tokens), ..Request::new(vec![1; prompt]) }
    }

    fn end(request: RequestId) -> Output {
        Output {
            request,
            choice: 0,
            token_id: None,
            text: String::new(),
            logprobs: None,
            prompt_logprobs: None,
            finish: Some(FinishReason::Length),
            routed_experts: None,
            num_cached_tokens: 0,
        }
    }

    /// The requests that are given now: rank and number of each.
    fn given(dispatcher: &mut Dispatcher) -> Vec<(usize, u64)> {
        let next = || dispatcher.next(Instant::now());
        std::iter::from_fn(next).map(|assigned| (assigned.rank, assigned.id.0)).collect()
    }

    #[test]
    fn a_rank_gets_more_when_it_has_room_and_the_least_work() {
        // Four sequences and one that stands ready, on each of the two ranks.
        let mut dispatcher = Dispatcher::new(FCFS, 2, 4, 100);
        let ids: Vec<RequestId> = [90, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
            .map(|max_tokens| dispatcher.add(request(5, max_tokens)))
            .to_vec();
        let (first, second): (Vec<_>, Vec<_>) =
            given(&mut dispatcher).into_iter().partition(|(rank, _)| *rank == 0);
        // The second rank is full although it still has less work than the first.
        assert_eq!(second, [1, 2, 3, 4, 5].map(|id| (1, id)));
        assert_eq!(first, [0, 6, 7, 8, 9].map(|id| (0, id)));
        assert_eq!(given(&mut dispatcher), []);
        assert_eq!((dispatcher.num_unfinished(), dispatcher.rank_of(ids[10])), (12, None));
        dispatcher.reported(&Output { finish: None, ..end(ids[7]) });
        assert_eq!(given(&mut dispatcher), []);
        dispatcher.reported(&end(ids[7]));
        assert_eq!(given(&mut dispatcher), [(0, 10)]);
        for id in [ids[2], ids[3], ids[0]] {
            dispatcher.reported(&end(id));
        }
        assert_eq!(given(&mut dispatcher), [(1, 11)]);
        ids.iter().for_each(|&id| dispatcher.reported(&end(id)));
        assert!(dispatcher.is_empty() && dispatcher.num_unfinished() == 0);
        assert!(dispatcher.ranks.iter().all(|rank| rank.unfinished == 0 && rank.work == 0));
    }

    #[test]
    fn the_policy_orders_what_waits_and_choices_count() {
        let mut dispatcher = Dispatcher::new(SchedulingPolicy::LongestFirst, 2, 1, 50);
        for (prompt, max_tokens) in [(1, Some(3)), (1, Some(9)), (40, None), (1, Some(9)), (1, Some(30))] {
            dispatcher.add(Request { max_tokens, ..request(prompt, 1) });
        }
        // A quarter of one is rounded up to one. The long prompt leaves room for ten tokens. The two shortest are kept
        // for the end.
        assert_eq!(given(&mut dispatcher), [(0, 1), (1, 2), (0, 4), (1, 3)]);
        let several = dispatcher.add(Request { n: 3, ..request(1, 45) });
        dispatcher.reported(&end(RequestId(4)));
        dispatcher.reported(&end(RequestId(1)));
        assert_eq!(given(&mut dispatcher), [(0, several.0)]);
        assert_eq!(dispatcher.num_unfinished(), 3 + 3);
        let end_of = |choice| Output { choice, ..end(several) };
        assert_eq!(dispatcher.prompt_of(0, several, 1), Some(1));
        assert!(
            dispatcher.prompt_of(1, several, 1).is_none() && dispatcher.prompt_of(0, several, 3).is_none()
        );
        // The end of a choice counts once.
        [0, 1, 1].map(end_of).iter().for_each(|output| dispatcher.reported(output));
        assert_eq!((dispatcher.rank_of(several), dispatcher.prompt_of(0, several, 1)), (Some(0), None));
        dispatcher.reported(&end_of(2));
        assert_eq!(dispatcher.rank_of(several), None);
    }

    #[test]
    fn one_rank_takes_everything_at_once() {
        let mut dispatcher = Dispatcher::new(FCFS, 1, 1, 50);
        let ids: Vec<RequestId> = (0..9).map(|_| dispatcher.add(request(1, 1))).collect();
        assert_eq!(given(&mut dispatcher), ids.iter().map(|id| (0, id.0)).collect::<Vec<_>>());
    }

    #[test]
    fn who_is_late_or_in_a_hurry_does_not_wait_for_room() {
        let mut dispatcher = Dispatcher::new(FCFS, 2, 1, 50);
        let ids: Vec<RequestId> = (0..5).map(|_| dispatcher.add(request(1, 10))).collect();
        let timeout = Some(Duration::from_secs(5));
        let late = dispatcher.add(Request { timeout, ..request(1, 10) });
        assert_eq!(given(&mut dispatcher).len(), 4);
        let now = Instant::now() + Duration::from_secs(6);
        let assigned = dispatcher.next(now).unwrap();
        assert!(assigned.id == late && assigned.waited >= Duration::from_secs(5));
        assert!(dispatcher.next(now).is_none());
        assert_eq!(dispatcher.hurry(ids[0]).map(|assigned| assigned.id), None);
        assert_eq!(dispatcher.hurry(ids[4]).map(|assigned| assigned.id), Some(ids[4]));
        assert!(dispatcher.hurry(RequestId(77)).is_none() && dispatcher.rank_of(RequestId(77)).is_none());
        assert!(dispatcher.waiting.is_empty() && dispatcher.deadlines.is_empty());
    }
}
