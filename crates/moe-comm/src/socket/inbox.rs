//! What has arrived from the other ranks and waits to be taken.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::round::wait::Absent;
use crate::socket::frame::PostHead;

/// Rounds that a rank can be ahead of this one: it has posted the next, and cannot end it.
const MAX_POSTS: usize = 2;
/// Bytes of messages of one rank that wait.
const MAX_MESSAGES: usize = 1 << 30;

/// A rank's part of a round, as it arrived.
pub(super) type Arrived = (PostHead, Vec<u64>);

/// Everything from everyone.
#[derive(Default)]
pub(super) struct Inbox {
    /// By group and world rank.
    posts: HashMap<(u64, usize), VecDeque<Arrived>>,
    /// Groups whose communicator a rank has dropped.
    left: HashSet<(u64, usize)>,
    /// By world rank.
    messages: Vec<Messages>,
    /// Ranks that have said goodbye.
    gone: Vec<bool>,
    /// This rank is done.
    pub over: bool,
}

#[derive(Default)]
struct Messages {
    waiting: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Inbox {
    pub fn new(size: usize) -> Self {
        let messages = (0..size).map(|_| Messages::default()).collect();
        Self { messages, gone: vec![false; size], ..Self::default() }
    }

    /// Keeps a post; what is wrong with it if a healthy rank cannot have sent it.
    pub fn post(&mut self, group: u64, from: usize, post: Arrived) -> Result<(), String> {
        let posts = self.posts.entry((group, from)).or_default();
        if posts.len() == MAX_POSTS {
            return Err(format!("{MAX_POSTS} rounds are open, and it sent another"));
        }
        posts.push_back(post);
        Ok(())
    }

    pub fn message(&mut self, from: usize, message: Vec<u8>) -> Result<(), String> {
        let Some(messages) = self.messages.get_mut(from) else { return Ok(()) };
        messages.bytes = messages.bytes.saturating_add(message.len());
        messages.waiting.push_back(message);
        match messages.bytes > MAX_MESSAGES {
            true => Err(format!("its messages that wait are more than {MAX_MESSAGES} bytes")),
            false => Ok(()),
        }
    }

    pub fn leave(&mut self, group: u64, from: usize) {
        self.left.insert((group, from));
    }

    pub fn bye(&mut self, from: usize) {
        if let Some(gone) = self.gone.get_mut(from) {
            *gone = true;
        }
    }

    pub fn is_gone(&self, rank: usize) -> bool {
        self.gone.get(rank).copied().unwrap_or(false)
    }

    pub fn take_message(&mut self, from: usize) -> Option<Vec<u8>> {
        let messages = self.messages.get_mut(from)?;
        let message = messages.waiting.pop_front()?;
        messages.bytes -= message.len();
        Some(message)
    }

    /// The next posts of all members but `own`, in order, if all are there.
    pub fn take_posts(&mut self, group: u64, members: &[usize], own: usize) -> Option<Vec<Arrived>> {
        let others = || members.iter().enumerate().filter(|&(rank, _)| rank != own).map(|(_, &m)| m);
        others().all(|member| self.has_post(group, member)).then_some(())?;
        others().map(|member| self.posts.get_mut(&(group, member))?.pop_front()).collect()
    }

    /// The members whose posts are not there.
    pub fn absent(&self, group: u64, members: &[usize], own: usize) -> Absent {
        let is_missing = |&rank: &usize| rank != own && !self.has_post(group, members[rank]);
        let missing: Vec<usize> = (0..members.len()).filter(is_missing).collect();
        let has_left =
            |&rank: &usize| self.is_gone(members[rank]) || self.left.contains(&(group, members[rank]));
        let gone = missing.iter().copied().filter(has_left).collect();
        Absent { missing, gone }
    }

    /// Forgets a group.
    pub fn forget(&mut self, group: u64) {
        self.posts.retain(|(g, _), _| *g != group);
        self.left.retain(|(g, _)| *g != group);
    }

    fn has_post(&self, group: u64, member: usize) -> bool {
        self.posts.get(&(group, member)).is_some_and(|posts| !posts.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Call, Op};

    #[test]
    fn what_waits_is_bounded() {
        let mut inbox = Inbox::new(2);
        let post = || (PostHead { call: Call::bare(Op::Barrier), split: None, rows: None }, Vec::new());
        assert!(inbox.post(0, 1, post()).is_ok() && inbox.post(0, 1, post()).is_ok());
        assert!(inbox.post(0, 1, post()).unwrap_err().contains("2 rounds are open"));
        assert!(inbox.post(9, 1, post()).is_ok());
        assert!(inbox.take_posts(0, &[0, 1], 0).is_some() && inbox.post(0, 1, post()).is_ok());
        inbox.forget(0);
        assert!(inbox.take_posts(0, &[0, 1], 0).is_none() && inbox.take_posts(9, &[0, 1], 0).is_some());
        assert!(inbox.message(1, vec![0; MAX_MESSAGES / 2]).is_ok());
        assert!(inbox.message(1, vec![0; MAX_MESSAGES / 2]).is_ok());
        assert!(inbox.message(1, vec![1]).unwrap_err().contains("bytes"));
        assert_eq!(inbox.take_message(1).map(|m| m.len()), Some(MAX_MESSAGES / 2));
    }
}
