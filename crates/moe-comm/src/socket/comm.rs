//! The communicator between processes. In each round a rank sends every other rank the data that it needs.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{Result, bail};
use moe_kernels::{Exec, Scratch, View};

use crate::call::Call;
use crate::check::Place;
use crate::communicator::Communicator;
use crate::round::wait::{Outcome, Stop, Wait};
use crate::round::{Give, Posts, Rounds, copied, label};
use crate::socket::frame::{self, Outgoing, PostHead};
use crate::socket::inbox::Arrived;
use crate::socket::messages::{Messages, Watch};
use crate::socket::world::{Member, Survival, World};
use crate::supervised::{Supervised, Supervisor};

/// The id of the group of all ranks of the first generation.
const ALL: u64 = 0;

/// One rank in a world of processes that are connected by TCP. Tensors are on the CPU.
///
/// Results have the same bits as with [`ThreadComm`](crate::ThreadComm). Only one thread at a time may use a rank: a
/// second concurrent call is an error. Dropping the communicator means leaving the group: ranks that still wait for
/// this one fail. A process that ends without dropping it fails the world at once.
#[derive(Debug)]
pub struct SocketComm {
    pub(super) member: Arc<Member>,
    pub(super) generation: usize,
    group: u64,
    /// The group's ranks as ranks of the world.
    pub(super) members: Vec<usize>,
    rank: usize,
    /// This lock is held during a call.
    turn: Mutex<()>,
    /// Whether another component reports this rank's panic, with its message.
    supervised: bool,
}

impl SocketComm {
    /// Makes the ranks 0..n of a new world in this process, over the loopback interface, for tests and measurements.
    /// Move each rank to its own thread. A rank waits at most `timeout` for the others in one collective.
    ///
    /// # Errors
    /// The loopback interface cannot be used, or the system's limit of open files is reached.
    pub fn loopback(n: usize, timeout: Duration) -> Result<Vec<SocketComm>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let mut streams: Vec<Vec<Option<TcpStream>>> =
            (0..n).map(|_| (0..n).map(|_| None).collect()).collect();
        for high in 1..n {
            let (lower, upper) = streams.split_at_mut(high);
            for (low, row) in lower.iter_mut().enumerate() {
                let stream = TcpStream::connect(listener.local_addr()?)?;
                let (other, from) = listener.accept()?;
                if from != stream.local_addr()? {
                    bail!("a stranger connected from {from} while the world formed")
                }
                (row[high], upper[0][low]) = (Some(stream), Some(other));
            }
        }
        let start = |(rank, streams)| Self::start(rank, streams, timeout);
        streams.into_iter().enumerate().map(start).collect()
    }

    /// Makes the world of a rank with a connection to each other rank.
    pub(super) fn start(rank: usize, streams: Vec<Option<TcpStream>>, timeout: Duration) -> Result<Self> {
        let members = (0..streams.len()).collect();
        let member = World::start(rank, streams, timeout)?;
        Ok(Self { member, generation: 0, group: ALL, members, rank, turn: Mutex::new(()), supervised: false })
    }

    /// This process's rank in a generation, whose group of all ranks is `group`.
    pub(super) fn of_generation(&self, generation: usize, group: u64, members: Vec<usize>) -> Result<Self> {
        let own = self.world().rank;
        let Some(rank) = members.iter().position(|&rank| rank == own) else {
            bail!("rank {own} is not among the ranks {members:?} that go on")
        };
        let member = self.member.clone();
        Ok(Self { member, generation, group, members, rank, turn: Mutex::new(()), supervised: false })
    }

    /// From now on this process survives the loss of a rank of another replica: a rank that ends without leaving, or
    /// that gives no sign of life. A replica is `size` ranks that follow each other, from rank 0 on. If one rank of a
    /// replica is lost, all of them are; those that still run are told to end, and their world fails. [`Messages`] tell
    /// that a rank is lost, and a collective with it fails the world. The first replica cannot be lost: without one of
    /// its ranks the world fails. All ranks call this, in worlds whose replicas share no collective.
    pub fn survive_replicas(&self, size: usize) {
        self.world().survive(Survival { replica: size, regroups: false });
    }

    /// Like [`survive_replicas`](Self::survive_replicas), where replicas share collectives. If a rank is lost or a
    /// collective fails, everything that uses this communicator fails, on all ranks. The ranks that are left then
    /// [`regroup`](Self::regroup).
    pub fn survive_by_regrouping(&self, size: usize) {
        self.world().survive(Survival { replica: size, regroups: true });
    }

    /// Messages between this process and the others, which are independent of the collectives.
    pub fn messages(&self) -> Messages {
        let (member, generation) = (self.member.clone(), self.generation);
        Messages { member, generation, members: self.members.as_slice().into() }
    }

    /// Fails the world, also if its generation has ended.
    pub fn fail_world(&self, reason: &str) {
        self.world().fail(format!("rank {} aborted: {reason}", self.world().rank));
    }

    /// An object that reports how the world ends; a separate thread waits on it.
    pub fn watcher(&self) -> Watch {
        Watch(self.world().clone())
    }

    pub(super) fn world(&self) -> &Arc<World> {
        &self.member.0
    }

    /// The other ranks, as ranks of the group and of the world. The order starts after this rank and wraps around, so
    /// that not all ranks write to the first one first.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let n = self.members.len();
        (1..n).map(move |i| (self.rank + i) % n).filter_map(|rank| Some((rank, *self.members.get(rank)?)))
    }

    /// Fails if another rank passed counts for a different number of ranks than the group has.
    fn check_counts(&self, arrived: &[Arrived]) -> Outcome<()> {
        let size = self.members.len();
        let others = (0..size).filter(|&rank| rank != self.rank);
        match others.zip(arrived).find(|(_, (head, _))| !head.call.counts.are_of(size)) {
            Some((rank, (head, _))) => {
                let rank = self.label(&[rank]);
                let counts = &head.call.counts;
                Err(Stop::Cause(format!(
                    "{rank} broke the protocol: rows of {size} ranks are counted as {counts:?}"
                )))
            }
            None => Ok(()),
        }
    }

    /// Sends each of the other ranks the data that it needs, and returns the data that this rank needs of its own.
    fn give(&self, call: Call, give: Give<'_>, ex: &Exec) -> Outcome<Post> {
        let local = |e| self.local(&e);
        let mut head = PostHead { call, split: None, rows: None };
        if let Give::Split { color, key } = give {
            head.split = Some((color, key, self.world().new_group()));
        }
        let own = match &give {
            Give::Rows(rows, parts) => {
                let own = parts.of(*rows, self.rank).map_err(local)?;
                Rows::Own(copied(own, ex).map_err(local)?)
            }
            _ => Rows::Sent(Vec::new()),
        };
        for (rank, to) in self.others() {
            let data = match &give {
                Give::Rows(rows, parts) => {
                    let part = parts.of(*rows, rank).map_err(local)?;
                    head.rows = Some(part.dims().to_vec());
                    frame::bytes(part).map_err(local)?
                }
                _ => &[],
            };
            self.world().send(to, &Outgoing::post(self.group, &head), data)?;
        }
        Ok(Post { head, rows: own })
    }
}

impl Rounds for SocketComm {
    type Posts = Received;

    fn place(&self) -> Place {
        Place { rank: self.rank, size: self.members.len() }
    }

    fn turn(&self) -> &Mutex<()> {
        &self.turn
    }

    fn exchange(&self, call: Call, give: Give<'_>, ex: &Exec) -> Outcome<Received> {
        let world = self.world();
        let group = self.group;
        let members = &self.members;
        let own = self.rank;
        if self.failure().is_some() {
            return Err(Stop::Failed);
        }
        let op = call.op;
        let given = self.give(call, give, ex)?;
        let (failed, label) = (|| self.failure().is_some(), |ranks: &[usize]| self.label(ranks));
        let wait = Wait { op, why: "for", timeout: world.timeout, failed: &failed, label: &label };
        let arrived = wait.until(
            (&world.inbox, &world.changed),
            |inbox| inbox.take_posts(group, members, own),
            |inbox| inbox.absent(group, members, own),
        )?;
        self.check_counts(&arrived)?;
        let mut posts: Vec<Post> =
            arrived.into_iter().map(|(head, data)| Post { head, rows: Rows::Sent(data) }).collect();
        posts.insert(own, given);
        Ok(Received(posts))
    }

    fn end(&self, _: Received) {}

    fn join(&self, posts: &Received, members: &[usize], own: usize) -> Result<Arc<dyn Communicator>> {
        let leader = members.first().and_then(|&leader| posts.0.get(leader)?.head.split);
        let Some((_, _, group)) = leader else { bail!("the split lost its first rank") };
        let world_rank = members.first().and_then(|&leader| self.members.get(leader));
        if world_rank.is_none_or(|&rank| !World::is_group_of(rank, group)) {
            bail!("{} names a group that it does not lead", self.label(&members[..1]))
        }
        let members = members.iter().filter_map(|&rank| self.members.get(rank).copied()).collect();
        let member = self.member.clone();
        let (generation, turn) = (self.generation, Mutex::new(()));
        Ok(Arc::new(Self {
            member,
            generation,
            group,
            members,
            rank: own,
            turn,
            supervised: self.supervised,
        }))
    }

    fn label(&self, ranks: &[usize]) -> String {
        label(ranks, &self.members)
    }

    fn fail(&self, cause: String) {
        // What fails after the end of a generation fails because of that.
        if self.failure().is_none() {
            self.world().fail(cause);
        }
    }

    fn give_up(&self, cause: String) {
        if self.failure().is_none() {
            self.world().give_up(self.generation, cause);
        }
    }

    fn failure(&self) -> Option<&str> {
        self.world().failure().or_else(|| self.world().why_ended(self.generation))
    }
}

/// The data that this rank has from every rank of its group.
pub(crate) struct Received(Vec<Post>);

struct Post {
    head: PostHead,
    rows: Rows,
}

enum Rows {
    Own(Scratch),
    /// The elements, in words, if the head has row dims.
    Sent(Vec<u64>),
}

impl Posts for Received {
    fn calls(&self) -> Vec<&Call> {
        self.0.iter().map(|post| &post.head.call).collect()
    }

    fn rows(&self, from: usize) -> Result<View<'_>> {
        let Some(Post { head, rows }) = self.0.get(from) else { bail!("there is no rank {from}") };
        match (rows, head.call.dtype, &head.rows) {
            (Rows::Own(rows), ..) => Ok(rows.view()),
            (Rows::Sent(data), Some(dtype), Some(dims)) => frame::view(dtype, dims, data),
            _ => bail!("rank {from} sent no rows"),
        }
    }

    fn split(&self, from: usize) -> Result<(usize, usize)> {
        match self.0.get(from).and_then(|post| post.head.split) {
            Some((color, key, _)) => Ok((color, key)),
            None => bail!("rank {from} sent no colour"),
        }
    }
}

impl Supervised for SocketComm {
    fn supervise(&mut self) -> Supervisor {
        self.supervised = true;
        // The connections stay open until the end of the rank has been explained to the others.
        let name = self.name();
        let member = self.member.clone();
        Supervisor::new(name, move |cause| member.0.fail(cause))
    }
}

impl Drop for SocketComm {
    fn drop(&mut self) {
        let world = self.world().clone();
        if std::thread::panicking() && !self.supervised {
            return world.fail(format!("{} panicked", self.name()));
        }
        if !std::thread::panicking() && world.failure().is_none() {
            let leave = Outgoing::Leave { group: self.group };
            for (_, to) in self.others() {
                // A rank that this frame does not reach sees the connection close.
                let _ = world.send(to, &leave, &[]);
            }
        }
        crate::lock::lock(&world.inbox).forget(self.group);
    }
}
