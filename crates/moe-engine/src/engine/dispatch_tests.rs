//! Tests of the [dispatcher](super) alone.

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
    assert!(dispatcher.prompt_of(1, several, 1).is_none() && dispatcher.prompt_of(0, several, 3).is_none());
    // The end of a choice counts once.
    [0, 1, 1].map(end_of).iter().for_each(|output| dispatcher.reported(output));
    assert_eq!((dispatcher.rank_of(several), dispatcher.prompt_of(0, several, 1)), (Some(0), None));
    dispatcher.reported(&end_of(2));
    assert_eq!(dispatcher.rank_of(several), None);
}

#[test]
fn what_a_lost_rank_ran_goes_to_the_others_once() {
    let mut dispatcher = Dispatcher::new(FCFS, 3, 1, 50);
    dispatcher.keep_requests(1);
    let several = Request { n: 2, ..request(1, 10) };
    let ids = [request(1, 40), several, request(1, 10), request(1, 30), request(1, 5)]
        .map(|request| dispatcher.add(request));
    assert_eq!(given(&mut dispatcher), [(0, 0), (1, 1), (2, 2), (2, 3), (0, 4)]);
    let end_of = |choice| Output { choice, ..end(ids[1]) };
    dispatcher.reported(&end_of(0));
    dispatcher.cancelled(ids[1]);
    let left = dispatcher.lose(1);
    assert_eq!(left, Left { restarted: vec![(ids[1], 1)], cancelled: vec![ids[1]] });
    assert!(dispatcher.prompt_of(1, ids[1], 1).is_none() && dispatcher.num_unfinished() == 5);
    // The other ranks have no room yet, and the lost one gets nothing.
    assert_eq!(given(&mut dispatcher), []);
    dispatcher.reported(&end(ids[2]));
    assert_eq!(given(&mut dispatcher), [(2, 1)]);
    // Its first choice ends for the second time, which changes nothing for the caller.
    assert!(!dispatcher.report(&Output { finish: None, ..end_of(0) }) && dispatcher.report(&end_of(1)));
    assert_eq!((dispatcher.num_unfinished(), dispatcher.rank_of(ids[1])), (3, Some(2)));
    assert_eq!(dispatcher.prompt_of(2, ids[1], 0), Some(1));
    assert!(!dispatcher.report(&end_of(0)));
    assert_eq!((dispatcher.num_unfinished(), dispatcher.rank_of(ids[1])), (3, None));
    // The rank that is left alone runs everything.
    assert_eq!(dispatcher.lose(2).restarted, [(ids[3], 0)]);
    [ids[0], ids[4]].map(end).iter().for_each(|output| dispatcher.reported(output));
    assert_eq!(given(&mut dispatcher), [(0, 3)]);
    dispatcher.reported(&end(ids[3]));
    assert!(dispatcher.is_empty() && dispatcher.num_unfinished() == 0 && !dispatcher.is_busy(0));
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

#[test]
fn what_all_ranks_ran_goes_to_fewer_ranks_once() {
    let mut dispatcher = Dispatcher::new(FCFS, 3, 1, 50);
    dispatcher.keep_requests(0);
    let several = Request { n: 2, ..request(1, 10) };
    let ids = [several, request(1, 10), request(1, 10), request(1, 10), request(1, 10)]
        .map(|request| dispatcher.add(request));
    assert_eq!(given(&mut dispatcher), [(0, 0), (1, 1), (2, 2), (1, 3), (2, 4)]);
    dispatcher.reported(&end(ids[0]));
    dispatcher.reported(&end(ids[1]));
    dispatcher.cancelled(ids[2]);
    let last = dispatcher.add(request(1, 10));
    let left = dispatcher.move_to(Dispatcher::new(FCFS, 2, 1, 50));
    let mut restarted = left.restarted;
    restarted.sort_unstable();
    assert_eq!(restarted, [(ids[0], 1), (ids[2], 0), (ids[3], 0), (ids[4], 0)]);
    assert_eq!((left.cancelled, dispatcher.num_unfinished()), (vec![ids[2]], 5));
    assert_eq!(given(&mut dispatcher), [(0, 0), (1, 2), (1, 3)]);
    // The choice that had ended runs again for the other one's sake, and tells nothing.
    assert!(!dispatcher.report(&end(ids[0])) && dispatcher.report(&Output { choice: 1, ..end(ids[0]) }));
    assert!(dispatcher.report(&end(ids[3])) && dispatcher.report(&end(ids[2])));
    assert_eq!(given(&mut dispatcher), [(0, 4), (1, last.0)]);
    assert!(dispatcher.report(&end(ids[4])) && dispatcher.report(&end(last)) && dispatcher.is_empty());
}
