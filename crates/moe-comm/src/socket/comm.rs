//! The communicator between processes: in a round each rank sends every other one what it needs.

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
use crate::socket::world::{Member, World};
use crate::supervised::{Supervised, Supervisor};

/// The group of all ranks.
const ALL: u64 = 0;

/// One rank of a world of processes, connected by TCP; tensors are on the CPU.
///
/// Results have the bits of [`ThreadComm`](crate::ThreadComm). A rank is used from one thread at a
/// time: a second concurrent call is an error. Dropping the communicator is leaving: ranks that
/// still wait for this one fail. A process that ends without that fails the world at once.
#[derive(Debug)]
pub struct SocketComm {
    member: Arc<Member>,
    group: u64,
    /// The group's ranks as ranks of the world.
    members: Vec<usize>,
    rank: usize,
    /// Held during a call.
    turn: Mutex<()>,
    /// Someone else reports this rank's panic, with its message.
    supervised: bool,
}

impl SocketComm {
    /// The ranks 0..n of a new world in this process, over the loopback interface, to be moved to a
    /// thread each: for tests and for measuring. They wait `timeout` for each other in one collective.
    ///
    /// # Errors
    /// The loopback interface or the system's limit of open files.
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

    /// The world of a rank with a connection to each other one.
    pub(super) fn start(rank: usize, streams: Vec<Option<TcpStream>>, timeout: Duration) -> Result<Self> {
        let members = (0..streams.len()).collect();
        let member = World::start(rank, streams, timeout)?;
        Ok(Self { member, group: ALL, members, rank, turn: Mutex::new(()), supervised: false })
    }

    /// Messages between this process and the others, beside the collectives.
    pub fn messages(&self) -> Messages {
        Messages(self.member.clone())
    }

    /// Tells how the world ends, to a thread that does nothing else.
    pub fn watcher(&self) -> Watch {
        Watch(self.world().clone())
    }

    fn world(&self) -> &Arc<World> {
        &self.member.0
    }

    /// Ranks of the group and of the world, from the one after this one around, so that not all
    /// ranks write to the first one first.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let n = self.members.len();
        (1..n).map(move |i| (self.rank + i) % n).filter_map(|rank| Some((rank, *self.members.get(rank)?)))
    }

    /// Fails where another rank counts the rows of more or fewer ranks than there are.
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

    /// Sends what each of the others needs; what this rank needs itself.
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
        if world.failure().is_some() {
            return Err(Stop::Failed);
        }
        let op = call.op;
        let given = self.give(call, give, ex)?;
        let (failed, label) = (|| world.failure().is_some(), |ranks: &[usize]| self.label(ranks));
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
        let turn = Mutex::new(());
        Ok(Arc::new(Self { member, group, members, rank: own, turn, supervised: self.supervised }))
    }

    fn label(&self, ranks: &[usize]) -> String {
        label(ranks, &self.members)
    }

    fn fail(&self, cause: String) {
        self.world().fail(cause);
    }

    fn failure(&self) -> Option<&str> {
        self.world().failure()
    }
}

/// What this rank has from every rank of its group.
pub(crate) struct Received(Vec<Post>);

struct Post {
    head: PostHead,
    rows: Rows,
}

enum Rows {
    Own(Scratch),
    /// Elements, if the head has dims of rows.
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
        // Kept until the rank's end is explained: the connections stay open so long.
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
                // A rank that cannot be told sees the connection close.
                let _ = world.send(to, &leave, &[]);
            }
        }
        crate::lock::lock(&world.inbox).forget(self.group);
    }
}
