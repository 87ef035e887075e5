//! Ranks in several processes, on one host or many, with a TCP connection between any two.
//!
//! [`rendezvous`] makes the connections. Each begins with a [`handshake`] of two processes that know a [`secret`]. One
//! thread per connection reads [`frame`]s into the [`inbox`], so that writing never waits for a rank that is itself
//! writing. A collective is a round, as with threads: each rank sends every other rank its call and the rows that the
//! other rank needs, and waits for their data. [`Messages`] of any size can be sent between two ranks independently of
//! the collectives, and a rank may wait for them without a limit.
//!
//! A rank that ends says goodbye. A connection fails the [`world`] if it closes without a goodbye, breaks, or carries
//! anything but frames. The first failure is sent to all ranks, in whatever group it happened. A world of replicas may
//! instead go on without the replica of such a rank; if replicas share collectives, the ranks that are left
//! [`regroup`].

mod admission;
mod comm;
mod frame;
mod handshake;
mod inbox;
mod link;
mod messages;
mod reach;
mod regroup;
mod rendezvous;
mod secret;
mod timeouts;
mod world;

pub use comm::SocketComm;
pub use frame::check_frames;
pub use messages::{Messages, News, Watch};
pub use regroup::check_formed;
pub use rendezvous::Join;
pub use secret::{WORLD_SECRET, WorldSecret};
pub use timeouts::SocketTimeouts;
