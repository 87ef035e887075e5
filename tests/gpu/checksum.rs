//! The checksum of an expert's weights: the device computes the CPU's checksum for any length, and ignores bytes after
//! the end.

use moe_kernels::{Buffer, checksum, checksum_of_sum, word_sum_into};

use crate::common::{Rng, cuda, small};

#[test]
fn a_device_sums_the_words_that_the_cpu_sums() {
    let ex = cuda();
    let mut rng = Rng::new();
    let lens = [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 4095, 65_536, 1_000_003, 9_437_184, 9_437_185];
    for len in small(lens, 70_000, |&len| len) {
        let bytes: Vec<u8> = (0..len + 40).map(|_| rng.bits() as u8).collect();
        let host = Buffer::from_vec(bytes.clone(), &[len + 40]).unwrap();
        let mut data = ex.zeros(candle_core::DType::U8, &[len + 40]).unwrap();
        ex.copy_from_host(host.view(), data.view_mut()).unwrap();
        // The output contains a sum of an earlier call and a neighbouring value.
        let mut sums = ex.zeros(candle_core::DType::I64, &[2]).unwrap();
        let before = Buffer::from_vec(vec![-77i64, 99], &[2]).unwrap();
        for _ in 0..2 {
            ex.copy_from_host(before.view(), sums.view_mut()).unwrap();
            let bytes = data.view().narrow(0, len).unwrap();
            word_sum_into(bytes, sums.view_mut().narrow(0, 1).unwrap(), &ex).unwrap();
        }
        let sums = ex.to_host(sums.view()).unwrap();
        let sums = sums.view().cpu::<i64>().unwrap();
        assert_eq!((checksum_of_sum(len, sums[0]), sums[1]), (checksum(&bytes[..len]), 99), "{len} bytes");
    }
}

#[test]
fn bytes_that_begin_between_vectors_are_refused() {
    let ex = cuda();
    let data = ex.zeros(candle_core::DType::U8, &[64]).unwrap();
    let mut sum = ex.zeros(candle_core::DType::I64, &[1]).unwrap();
    let error = word_sum_into(data.view().narrow(8, 40).unwrap(), sum.view_mut(), &ex).unwrap_err();
    assert!(error.to_string().contains("multiples of 16 bytes"), "{error}");
}
