package graphopt;

/** Says in one line what went wrong: the thing, what was expected, what was found, what to do. */
public class GraphoptException extends Exception {
    private static final long serialVersionUID = 1;

    public GraphoptException(String line) {
        super(line.replaceAll("\\p{Cntrl}", " "));
    }

    /** The loss or the new state is infinite or NaN. The old state stays: train on with the next batch. */
    public static final class NotFinite extends GraphoptException {
        private static final long serialVersionUID = 1;

        NotFinite(String line) {
            super(line);
        }
    }

    /** The runtime computes other numbers than the proof has. */
    public static final class Unproven extends GraphoptException {
        private static final long serialVersionUID = 1;

        Unproven(String line) {
            super(line);
        }
    }
}
