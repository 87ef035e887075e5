//! Counts the memory of compiled grammars. No more grammars are compiled ahead than there is room for.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The number of bytes that are taken, and a signal for when some are returned.
#[derive(Default)]
pub(super) struct Room {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// A part of the room. It is returned when this value is dropped.
pub(super) struct Taken {
    room: Arc<Room>,
    bytes: usize,
}

impl Room {
    /// Waits until less than `limit` bytes are taken.
    pub fn wait_below(&self, limit: usize) {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self.freed.wait_while(taken, |taken| *taken >= limit);
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes bytes, even if there is no room.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Taken {
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) += bytes;
        Taken { room: self.clone(), bytes }
    }
}

impl Taken {
    /// Returns the number of bytes of this part.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.room.taken.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
        self.room.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_waits_goes_on_when_enough_is_given_back() {
        let room = Arc::new(Room::default());
        let parts = [room.take(6), room.take(5)];
        let waiting = room.clone();
        let waits = thread::spawn(move || waiting.wait_below(6));
        thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_finished());
        let [large, small] = parts;
        drop(large);
        waits.join().unwrap();
        drop(small);
        room.wait_below(1);
    }
}
