//! Data from other ranks that has arrived and has not been taken yet.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use crate::round::wait::Absent;
use crate::socket::frame::{Frame, MAX_DATA, MAX_MESSAGE, PostHead};

/// The number of rounds that another rank can be ahead of this one: it may have posted the next round, but cannot end
/// it.
const MAX_POSTS: usize = 2;
/// Limit of the bytes of rows from one rank that wait to be taken.
const MAX_ROWS: u64 = MAX_DATA;
/// Limit of the bytes of messages from one rank that wait to be taken.
const MAX_MESSAGES: u64 = MAX_MESSAGE;
/// Memory that a message takes in addition to its bytes.
const PER_MESSAGE: u64 = 64;
/// Number of groups of one rank that this rank may know of. A model has four.
const MAX_GROUPS: usize = 1 << 16;

/// A rank's part of a round, as it arrived.
pub(super) type Arrived = (PostHead, Vec<u64>);

/// All data that has arrived, from all ranks.
#[derive(Default)]
pub(super) struct Inbox {
    /// Indexed by group and world rank.
    posts: HashMap<(u64, usize), VecDeque<Arrived>>,
    /// Groups and world ranks whose communicator has been dropped.
    left: HashSet<(u64, usize)>,
    /// Indexed by world rank.
    messages: Vec<Messages>,
    /// Indexed by world rank: bytes of the rows in rounds that have not ended.
    rows: Vec<u64>,
    /// Ranks that have said goodbye.
    gone: Vec<bool>,
    /// Ranks that ended in another way although the world goes on, and why.
    lost: BTreeMap<usize, String>,
    /// The newest generation that has formed, and its ranks.
    pub formed: (usize, Vec<usize>),
    /// Whether this rank has ended.
    pub over: bool,
}

#[derive(Default)]
struct Messages {
    /// With their generations.
    waiting: VecDeque<(usize, Vec<u8>)>,
    bytes: u64,
}

impl Inbox {
    pub fn new(size: usize) -> Self {
        let messages = (0..size).map(|_| Messages::default()).collect();
        let formed = (0, (0..size).collect());
        Self { messages, rows: vec![0; size], gone: vec![false; size], formed, ..Self::default() }
    }

    /// The error of a frame with `bytes` bytes of data from a rank, if there is no room for them. A healthy rank is
    /// never that far ahead of this one.
    pub fn room(&self, from: usize, frame: &Frame, bytes: u64) -> Result<(), String> {
        let (waits, most, what) = match frame {
            Frame::Post { .. } => (self.rows.get(from).copied(), MAX_ROWS, "rows"),
            Frame::Message(..) => {
                let waits = self.messages.get(from).map(|messages| messages.bytes);
                (waits, MAX_MESSAGES, "messages")
            }
            _ => return Ok(()),
        };
        match waits.unwrap_or(0).saturating_add(bytes) > most {
            true => Err(format!("its {what} that wait are more than {most} bytes")),
            false => Ok(()),
        }
    }

    /// Keeps a post. Returns an error if a healthy rank cannot have sent it.
    pub fn post(&mut self, group: u64, from: usize, post: Arrived) -> Result<(), String> {
        if self.posts.len() >= MAX_GROUPS && !self.posts.contains_key(&(group, from)) {
            return Err(format!("it has rounds in more than {MAX_GROUPS} groups"));
        }
        let posts = self.posts.entry((group, from)).or_default();
        if posts.len() == MAX_POSTS {
            return Err(format!("{MAX_POSTS} rounds are open, and it sent another"));
        }
        if let Some(rows) = self.rows.get_mut(from) {
            let more = *rows + size_of_val(&post.1[..]) as u64;
            // The words of a row may be up to seven bytes longer than its data.
            if more > MAX_ROWS + size_of::<u64>() as u64 {
                return Err(format!("its rows that wait are more than {MAX_ROWS} bytes"));
            }
            *rows = more;
        }
        posts.push_back(post);
        Ok(())
    }

    pub fn message(&mut self, from: usize, generation: usize, message: Vec<u8>) -> Result<(), String> {
        let Some(messages) = self.messages.get_mut(from) else { return Ok(()) };
        let bytes = messages.bytes + message.len() as u64 + PER_MESSAGE;
        if bytes > MAX_MESSAGES + PER_MESSAGE {
            return Err(format!("its messages that wait are more than {MAX_MESSAGES} bytes"));
        }
        messages.bytes = bytes;
        messages.waiting.push_back((generation, message));
        Ok(())
    }

    /// Notes that a rank has left a group. Returns an error if the rank cannot have been in that many groups.
    pub fn leave(&mut self, group: u64, from: usize) -> Result<(), String> {
        if self.left.len() >= MAX_GROUPS && !self.left.contains(&(group, from)) {
            return Err(format!("it has left more than {MAX_GROUPS} groups"));
        }
        self.left.insert((group, from));
        Ok(())
    }

    pub fn bye(&mut self, from: usize) {
        if let Some(gone) = self.gone.get_mut(from) {
            *gone = true;
        }
    }

    pub fn is_gone(&self, rank: usize) -> bool {
        self.gone.get(rank).copied().unwrap_or(false)
    }

    /// Notes that a rank is lost. Returns whether that is new.
    pub fn lose(&mut self, rank: usize, why: &str) -> bool {
        let is_new = !self.lost.contains_key(&rank);
        self.lost.entry(rank).or_insert_with(|| why.to_string());
        is_new
    }

    /// Why a rank was lost, if it was.
    pub fn why_lost(&self, rank: usize) -> Option<&str> {
        self.lost.get(&rank).map(String::as_str)
    }

    /// Whether any rank was lost.
    pub fn some_are_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Whether nothing else will come from a rank, because it said goodbye or was lost.
    pub fn has_ended(&self, rank: usize) -> bool {
        self.is_gone(rank) || self.lost.contains_key(&rank)
    }

    /// The next message of a generation. Messages of earlier ones are dropped.
    pub fn take_message(&mut self, from: usize, generation: usize) -> Option<Vec<u8>> {
        let messages = self.messages.get_mut(from)?;
        loop {
            let (its, message) = messages.waiting.pop_front_if(|(its, _)| *its <= generation)?;
            messages.bytes -= message.len() as u64 + PER_MESSAGE;
            if its == generation {
                return Some(message);
            }
        }
    }

    /// Takes the next posts of all members but `own`, in order, if all of them have arrived.
    pub fn take_posts(&mut self, group: u64, members: &[usize], own: usize) -> Option<Vec<Arrived>> {
        let others = || members.iter().enumerate().filter(|&(rank, _)| rank != own).map(|(_, &m)| m);
        others().all(|member| self.has_post(group, member)).then_some(())?;
        others().map(|member| self.take_post(group, member)).collect()
    }

    /// The members whose posts have not arrived.
    pub fn absent(&self, group: u64, members: &[usize], own: usize) -> Absent {
        let is_missing = |&rank: &usize| rank != own && !self.has_post(group, members[rank]);
        let missing: Vec<usize> = (0..members.len()).filter(is_missing).collect();
        let has_left =
            |&rank: &usize| self.has_ended(members[rank]) || self.left.contains(&(group, members[rank]));
        let gone = missing.iter().copied().filter(has_left).collect();
        Absent { missing, gone }
    }

    fn take_post(&mut self, group: u64, member: usize) -> Option<Arrived> {
        let post = self.posts.get_mut(&(group, member))?.pop_front()?;
        self.give_room(member, &post);
        Some(post)
    }

    fn give_room(&mut self, from: usize, post: &Arrived) {
        if let Some(rows) = self.rows.get_mut(from) {
            *rows -= size_of_val(&post.1[..]) as u64;
        }
    }

    /// Removes everything of a group.
    pub fn forget(&mut self, group: u64) {
        let members: Vec<usize> =
            self.posts.keys().filter(|(g, _)| *g == group).map(|(_, from)| *from).collect();
        for from in members {
            for post in self.posts.remove(&(group, from)).unwrap_or_default() {
                self.give_room(from, &post);
            }
        }
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
        let half = (MAX_MESSAGES / 2) as usize;
        let message = Frame::Message(0, Vec::new());
        assert!(inbox.room(1, &message, MAX_MESSAGES).is_ok() && inbox.message(1, 0, vec![0; half]).is_ok());
        assert!(inbox.room(1, &message, MAX_MESSAGES / 2).unwrap_err().contains("messages that wait"));
        assert!(inbox.message(1, 0, vec![0; half + 1]).unwrap_err().contains("bytes"));
        assert_eq!(inbox.take_message(1, 0).map(|m| m.len()), Some(half));
        assert!(inbox.room(1, &message, MAX_MESSAGES).is_ok());
        // Empty messages also take room.
        (0..1000).for_each(|_| inbox.message(1, 0, Vec::new()).unwrap());
        assert!(inbox.room(1, &message, MAX_MESSAGES - 1000).is_err());
        let rows = |bytes: usize| (post().0, vec![0u64; bytes / 8]);
        let frame = |group| Frame::Post { group, head: post().0, data: Vec::new() };
        inbox.post(3, 1, rows(800)).unwrap();
        inbox.post(4, 1, rows(800)).unwrap();
        assert!(inbox.room(1, &frame(5), MAX_ROWS - 1600).is_ok());
        assert!(inbox.room(1, &frame(5), MAX_ROWS - 1599).unwrap_err().contains("rows that wait"));
        inbox.forget(3);
        assert!(inbox.take_posts(4, &[0, 1], 0).is_some() && inbox.room(1, &frame(5), MAX_ROWS).is_ok());
        (0..MAX_GROUPS as u64).for_each(|group| inbox.leave(group, 1).unwrap());
        assert!(inbox.leave(0, 1).is_ok() && inbox.leave(u64::MAX, 1).is_err());
    }
}
