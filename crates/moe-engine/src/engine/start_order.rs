//! The order in which waiting sequences start with the policy `LongestFirst`.
//!
//! The last sequences start in the order of length, the longest first, as in list scheduling by longest processing
//! time. So all end at about the same time, and no step is nearly empty. All other sequences start before them, in
//! order of arrival. If these also started in the order of length, many would end in one step. Then their places would
//! stay empty, and all others would wait, while the prompts of their successors are computed together.

use std::collections::VecDeque;

use super::sequence::Sequence;

/// Number of sequences that start in the order of length: the ones that run at the end, and half as many that start
/// while others end.
pub(super) fn kept_for_the_end(max_num_seqs: usize) -> usize {
    max_num_seqs.saturating_add(max_num_seqs / 2)
}

/// Inserts a sequence into a queue, in which preempted sequences stand first.
pub(super) fn insert(waiting: &mut VecDeque<Sequence>, sequence: Sequence, max_num_seqs: usize) {
    let most = kept_for_the_end(max_num_seqs);
    let queue = waiting.make_contiguous();
    let new = queue.partition_point(Sequence::has_run);
    let last = new.max(queue.len().saturating_sub(most));
    let length = sequence.most_output();
    let place = last + queue[last..].partition_point(|other| other.most_output() >= length);
    waiting.insert(place, sequence);
    if waiting.len() - new <= most {
        return;
    }
    // The longest of the last sequences joins the ones that start in order of arrival.
    if let Some(longest) = waiting.remove(last) {
        let before = &waiting.make_contiguous()[new..last];
        let place = new + before.partition_point(|other| other.key < longest.key);
        waiting.insert(place, longest);
    }
}

/// The position of the sequence that starts next while the first sequences start: among the sequences that do not start
/// in the order of length, the one with the shortest prompt. No sequence is decoding at that time.
pub(super) fn first(waiting: &VecDeque<Sequence>, max_num_seqs: usize) -> usize {
    if waiting.front().is_some_and(Sequence::has_run) {
        return 0;
    }
    let early = waiting.len().saturating_sub(kept_for_the_end(max_num_seqs));
    let shortest = waiting.iter().take(early).enumerate().min_by_key(|(_, sequence)| sequence.prompt_len());
    shortest.map_or(0, |(place, _)| place)
}
