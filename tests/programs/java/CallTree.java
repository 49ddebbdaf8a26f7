// SPDX-License-Identifier: Apache-2.0
/** A known call tree: 20 times down, then heavy and light in the proportion 3 to 1. */
public class CallTree {
    static volatile long sink;

    static long spin(int n) {
        long x = n;
        for (int i = 0; i < n; i++) {
            x = x * 6364136223846793005L + (x >>> 7);
        }
        return x;
    }

    static long heavy(int n) {
        return spin(3 * n) ^ 1;
    }

    static long light(int n) {
        return spin(n) ^ 2;
    }

    static long down(int depth, int n) {
        if (depth > 0) {
            return down(depth - 1, n) + 1;
        }
        return heavy(n) + light(n);
    }

    /** Garbage, and code of the library between two methods of this class. */
    static long collect(int n) {
        java.util.ArrayList<Long> values = new java.util.ArrayList<>();
        for (int i = 0; i < n; i++) {
            values.add((long) i * i % 7);
        }
        values.sort((a, b) -> Long.compare(b, a));
        return values.get(0);
    }

    static void work(int n, boolean collects) {
        while (true) {
            sink += down(20, n);
            if (collects) {
                sink += collect(n / 8);
            }
        }
    }

    public static void main(String[] arguments) {
        int n = Integer.parseInt(arguments[0]);
        int threads = Integer.parseInt(arguments[1]);
        for (int i = 1; i < threads; i++) {
            Thread thread = new Thread(() -> work(n, true));
            thread.setDaemon(true);
            thread.start();
        }
        System.out.println("ready");
        work(n, threads > 1);
    }
}
