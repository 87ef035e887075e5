//! The order in which numbers were used last, in memory that does not grow.

/// Some of the numbers `0..n` in an order: a doubly linked list in an array, whose last entry is both ends. A number
/// that is not in it is linked to itself.
#[derive(Clone, Debug)]
pub(crate) struct Lru {
    /// [previous, next] by number.
    links: Vec<[u32; 2]>,
    len: usize,
}

impl Lru {
    /// An empty list for the numbers `0..n`.
    pub fn new(n: usize) -> Self {
        Self { links: (0..=n as u32).map(|number| [number; 2]).collect(), len: 0 }
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    fn ends(&self) -> u32 {
        self.links.len() as u32 - 1
    }

    /// The number at the front.
    pub fn first(&self) -> Option<u32> {
        let first = self.links[self.ends() as usize][1];
        (first != self.ends()).then_some(first)
    }

    /// Puts a number at the end, whether it was in the list or not.
    pub fn push(&mut self, number: u32) {
        self.remove(number);
        let ends = self.ends();
        let last = self.links[self.ends() as usize][0];
        self.links[number as usize] = [last, ends];
        self.links[last as usize][1] = number;
        self.links[ends as usize][0] = number;
        self.len += 1;
    }

    /// Takes a number out, if it is in it.
    pub fn remove(&mut self, number: u32) {
        let [previous, next] = self.links[number as usize];
        if next != number {
            self.links[previous as usize][1] = next;
            self.links[next as usize][0] = previous;
            self.links[number as usize] = [number; 2];
            self.len -= 1;
        }
    }
}
