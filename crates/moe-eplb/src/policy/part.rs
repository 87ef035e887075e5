//! Separates copies of an expert that a packing has put on one device.

/// Exchanges copies between devices until no device holds an expert twice. `slots` contains the expert of every slot,
/// `per_device` slots for each device, and `unit` is the load of one copy of an expert. Among all exchanges that
/// separate a pair, the one with the smallest peak of the two devices is chosen.
///
/// This succeeds if a device has at most as many slots as there are experts, and an expert has at most as many copies
/// as there are devices. The reason: some device does not hold the doubled expert. If that device holds another expert
/// twice, giving away one of these separates a pair, too. Otherwise all its experts differ, and the first device cannot
/// hold all of them.
pub(super) fn part_copies(slots: &mut [usize], per_device: usize, unit: impl Fn(usize) -> f32) {
    while let Some((from, to)) = best_exchange(slots, per_device, &unit) {
        slots.swap(from, to);
    }
}

/// The slot of a doubled expert and the slot to exchange it with; `None` if no expert is doubled.
fn best_exchange(slots: &[usize], per_device: usize, unit: &impl Fn(usize) -> f32) -> Option<(usize, usize)> {
    let copies = |device: usize, expert: usize| {
        slots[device * per_device..][..per_device].iter().filter(|&&e| e == expert).count()
    };
    let load = |device: usize| -> f32 {
        slots[device * per_device..][..per_device].iter().map(|&expert| unit(expert)).sum()
    };
    let loads: Vec<f32> = (0..slots.len() / per_device).map(load).collect();
    let from = (0..slots.len()).find(|&slot| copies(slot / per_device, slots[slot]) > 1)?;
    let here = from / per_device;
    let expert = slots[from];
    let mut best: Option<(f32, usize)> = None;
    for (to, &other) in slots.iter().enumerate() {
        let there = to / per_device;
        let parts = copies(there, expert) == 0 && (copies(here, other) == 0 || copies(there, other) > 1);
        if !parts {
            continue;
        }
        let moved = unit(expert) - unit(other);
        let peak = (loads[here] - moved).max(loads[there] + moved);
        if best.is_none_or(|(least, _)| peak < least) {
            best = Some((peak, to));
        }
    }
    best.map(|(_, to)| (from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_experts_part_and_the_copies_stay_the_same() {
        // Rows of three slots. In the last case only an exchange of two doubled experts helps at first.
        for start in [
            vec![0, 0, 1, 2, 3, 4],
            vec![0, 0, 1, 0, 2, 3, 1, 2, 3],
            vec![0, 0, 1, 1, 1, 2, 2, 0, 2],
            vec![0, 0, 0, 1, 1, 1, 2, 2, 2],
        ] {
            let mut slots = start.clone();
            part_copies(&mut slots, 3, |expert| expert as f32);
            for row in slots.chunks(3) {
                assert!(
                    row[0] != row[1] && row[1] != row[2] && row[0] != row[2],
                    "{start:?} became {slots:?}"
                );
            }
            let sorted = |mut slots: Vec<usize>| {
                slots.sort_unstable();
                slots
            };
            assert_eq!(sorted(slots), sorted(start));
        }
    }

    #[test]
    fn the_exchange_keeps_the_peak_low() {
        // Devices carry 10, 6 and 2. Only an exchange with an expert of the last device keeps every device at 6 or
        // less.
        let load = [1.0, 1.0, 1.0, 5.0, 5.0];
        let mut slots = vec![4, 4, 3, 1, 0, 2];
        part_copies(&mut slots, 2, |expert| load[expert]);
        assert_eq!(slots, [0, 4, 3, 1, 4, 2]);
    }
}
